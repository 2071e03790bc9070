"use strict";
// What runs and models wrote is untrusted: it becomes text nodes and numbers, never HTML.
const { panels, runs } = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const SVG = new Set(["svg", "path", "line", "text", "circle", "title"]);
const DASHES = [["none", "──"], ["6 4", "╌╌"], ["2 3", "┈┈"]];
const colour = (number) => `oklch(var(--light) 0.16 ${(250 + 137.5 * number) % 360})`;
const short = (value) => (value === null ? "unknown" : String(Number(value.toPrecision(3))));
const hidden = new Set();

function make(tag, attributes = {}, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const swatch = (number) => make("span", { class: "swatch", style: `background: ${colour(number)}` });
const options = (select, pairs) => select.replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));

function ticks(low, high, count, least = 0) {
  const raw = Math.max((high - low) / count, least) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const gap = [1, 2, 5, 10].find((each) => each * power >= raw * 0.999) * power;
  const first = Math.ceil(low / gap - 1e-9);
  return Array.from({ length: Math.floor(high / gap + 1e-9) - first + 1 }, (_, i) => Number(((first + i) * gap).toPrecision(12)));
}

function draw() {
  const shown = runs.map((run, number) => ({ ...run, number })).filter((run) => !hidden.has(run.number));
  at("charts").replaceChildren();
  panels.forEach((panel, number) => {
    const lines = shown.flatMap((run) =>
      run.curves
        .filter((curve) => curve.panel === number)
        .map((curve, i) => ({
          run,
          dash: i % DASHES.length,
          metric: curve.metric,
          points: run.steps.map((step, i) => [step, curve.values[i]]).filter(([, value]) => value !== null),
        }))
    ).filter((line) => line.points.length);
    if (lines.length) chart(panel, lines);
  });
}

function chart(panel, lines) {
  const names = DASHES.map((_, i) => [...new Set(lines.filter((line) => line.dash === i).map((line) => line.metric))].join(", "));
  const several = Boolean(names[1]);
  const about = names.filter(Boolean).map((name, i) => (several ? `${DASHES[i][1]} ${name}` : name)).join("  ");
  const readout = make("p", { class: "quiet" }, about);
  const box = make("div", { class: "chart" }, make("h3", {}, panel.title, " ", make("small", {}, panel.unit)));
  at("charts").append(box);
  const [left, right, top, bottom, height] = [52, 12, 8, 38, 230];
  const width = Math.max(box.clientWidth - 24, 150);
  const warnings = [...new Set(lines.map((line) => line.run))].flatMap((run) => run.warnings.map((each) => ({ run, ...each })));
  const points = lines.flatMap((line) => line.points);
  const range = (values) => values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const [x0, x1] = range([...points.map(([step]) => step), ...warnings.map(({ step }) => step)]);
  const [low, high] = range(points.map(([, value]) => value));
  const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  const x = (step) => (x1 > x0 ? left + ((step - x0) / (x1 - x0)) * (width - left - right) : (left + width - right) / 2);
  const y = (value) => height - bottom - ((value - low + pad) / (high - low + 2 * pad)) * (height - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${panel.title}, ${panel.unit}, by step` });
  for (const value of ticks(low - pad, high + pad, 5)) {
    svg.append(make("line", { x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const step of ticks(x0, x1, width / 70, 1))
    svg.append(make("text", { x: x(step), y: height - bottom + 16, "text-anchor": "middle" }, String(step)));
  svg.append(make("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "step"));
  for (const { run, step, signal, text } of warnings) {
    const style = `stroke: ${colour(run.number)}`;
    const title = make("title", {}, `${run.name}, step ${step}, ${signal}: ${text}`);
    svg.append(make("line", { class: "warning", x1: x(step), x2: x(step), y1: top, y2: height - bottom, style }, title));
  }
  for (const { run, dash, points: each } of lines) {
    const style = `stroke: ${colour(run.number)}; stroke-dasharray: ${DASHES[dash][0]}; stroke-width: ${lines.length > 20 ? 1 : 2}`;
    svg.append(make("path", { d: "M" + each.map(([step, value]) => `${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("L"), style }));
    if (each.length < 2) svg.append(make("circle", { cx: x(each[0][0]), cy: y(each[0][1]), r: 3, style: `fill: ${colour(run.number)}` }));
  }
  const steps = [...new Set(points.map(([step]) => step))];
  const cursor = make("line", { y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cursor);
  svg.onpointermove = (event) => {
    const place = ((event.clientX - svg.getBoundingClientRect().left) / svg.clientWidth) * width;
    const step = steps.reduce((best, each) => (Math.abs(x(each) - place) < Math.abs(x(best) - place) ? each : best));
    const values = lines.flatMap(({ run, metric, points: each }) =>
      each.filter((point) => point[0] === step).map(([, value]) => `${run.name} ${several ? metric + " " : ""}${short(value)}`));
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, x(step));
    cursor.setAttribute("visibility", "visible");
    readout.textContent = `Step ${step}: ${values.slice(0, 8).join(", ")}${values.length > 8 ? " …" : ""}`;
  };
  svg.onpointerleave = () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = about;
  };
  box.append(svg, readout);
}

// Ranks of numbers, 1 the highest; equal ones share the mean of their ranks.
const rank = (value, all) => all.filter((each) => each > value).length + (all.filter((each) => each === value).length + 1) / 2;

const KEYS = { score: (row) => row.score, gold: (row) => row.gold, gap: (row) => row.gap, tokens: (row) => row.tokens };
const valueOf = (row, key) => (key in KEYS ? KEYS[key](row) : row.info[key.slice(5)]) ?? null;

function addRanks(rows) {
  const both = rows.filter((row) => row.score !== null && row.gold !== null);
  const [scores, golds] = [both.map((row) => row.score), both.map((row) => row.gold)];
  rows.forEach((row) => (row.gap = null));
  both.forEach((row) => (row.gap = rank(row.gold, golds) - rank(row.score, scores)));
  return rows;
}

function card(side, row, place) {
  const fact = (name, value) => make("span", {}, `${name} `, make("b", {}, value));
  const facts = [fact("proxy", row.score === null ? "no verdict" : short(row.score))];
  if (row.gold !== null) facts.push(fact("gold", short(row.gold)));
  if (row.gap !== null) facts.push(fact("rank gap", short(row.gap)));
  const key = at("sort").value;
  if (key.startsWith("info:")) facts.push(fact(key.slice(5), short(valueOf(row, key))));
  if (typeof row.tokens === "number") facts.push(fact("tokens", short(row.tokens)));
  if (row.finished === false) facts.push(fact("", "cut off"));
  const head = make("div", { class: "facts" }, swatch(side.run), `step ${side.step}, #${place + 1}`, ...facts);
  const said = row.response === null ? "(no response)" : row.response || "(empty)";
  return make("article", {}, head, make("p", { class: "ask" }, row.instruction ?? ""), make("p", { class: "said" }, said));
}

const sides = [];
let most = 40;

function list() {
  const [key, sign, words] = [at("sort").value, Number(at("order").value), at("find").value.toLowerCase()];
  const chosen = sides.map((side) =>
    addRanks(runs[side.run].texts[side.step] ?? [])
      .filter((row) => `${row.instruction}\n${row.response}`.toLowerCase().includes(words))
      .sort((a, b) => {
        const [one, other] = [valueOf(a, key), valueOf(b, key)];
        return one === null || other === null ? (one === null) - (other === null) : sign * (one - other);
      })
  );
  const longest = Math.max(...chosen.map((rows) => rows.length));
  at("cards").replaceChildren();
  for (let place = 0; place < Math.min(most, longest); place += 1)
    chosen.forEach((rows, i) => at("cards").append(rows[place] ? card(sides[i], rows[place], place) : make("div", { class: "gap" })));
  if (!longest) at("cards").append("No response has these words.");
  at("more").hidden = longest <= most;
  at("meaning").hidden = key !== "gap";
}

function addSide(run, pick) {
  const side = { run };
  const [runBox, stepBox] = [make("select", { "aria-label": "run" }), make("select", { "aria-label": "step" })];
  const fill = (choose) => {
    const steps = Object.keys(runs[side.run].texts).map(Number).sort((a, b) => a - b);
    options(stepBox, steps.map((step) => [step, `step ${step} (${runs[side.run].texts[step].length})`]));
    side.step = stepBox.value = choose(steps);
  };
  options(runBox, runs.map((each, i) => [i, each.name]).filter(([i]) => Object.keys(runs[i].texts).length));
  runBox.value = run;
  runBox.onchange = () => {
    side.run = Number(runBox.value);
    fill((steps) => (steps.includes(Number(side.step)) ? side.step : steps.at(-1)));
    list();
  };
  stepBox.onchange = () => {
    side.step = stepBox.value;
    list();
  };
  fill(pick);
  sides.push(side);
  at("sides").append(make("div", { class: "side" }, runBox, stepBox));
}

function begin() {
  runs.forEach((run, number) => {
    const box = make("input", { type: "checkbox", checked: "" });
    box.onchange = () => {
      hidden[box.checked ? "delete" : "add"](number);
      draw();
    };
    at("runs").append(make("label", {}, box, swatch(number), make("span", {}, run.name)));
  });
  at("all").hidden = runs.length < 4;
  at("all").onclick = () => {
    const show = hidden.size > 0;
    for (const box of at("runs").querySelectorAll("input")) if (box.checked !== show) box.click();
  };
  const warnings = runs.flatMap((run) => run.warnings.map((each) => `${run.name}, step ${each.step}, ${each.signal}: ${each.text}`));
  at("warnings").hidden = !warnings.length;
  at("warnings").firstChild.textContent = `Warnings of monitors: ${warnings.length}`;
  at("warnings").lastChild.append(...warnings.map((text) => make("li", {}, text)));
  new ResizeObserver(draw).observe(at("runs"));
  const first = runs.findIndex((run) => Object.keys(run.texts).length);
  if (first < 0) return;
  at("texts").hidden = false;
  const rows = runs.flatMap((run) => Object.values(run.texts).flat());
  const keys = [["score", "proxy"], ["tokens", "tokens"], ...[...new Set(rows.flatMap((row) => Object.keys(row.info)))].map((key) => [`info:${key}`, key])];
  if (rows.some((row) => row.gold !== null)) keys.unshift(["gap", "proxy likes, gold does not"], ["gold", "gold"]);
  options(at("sort"), keys);
  addSide(first, (steps) => steps[0]);
  addSide(first, (steps) => steps.at(-1));
  for (const id of ["sort", "order", "find"]) at(id).oninput = list;
  at("more").onclick = () => {
    most += 40;
    list();
  };
  list();
}

begin();
