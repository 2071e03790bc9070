"use strict";
// Numbers answer, U takes back, S skips, C goes to the critique, R shows raw texts. Without this script the buttons do
// the same, and texts are raw.

// Markdown of responses, which are nobody's words: what is made is elements of a few kinds and text, never HTML or links.
const MOST = 40000; // characters that are drawn; a longer text stays raw
const SPAN = /`([^`\n]+)`|(?<![\w*])(\*{1,3})([^\s*](?:[^*\n]*[^\s*])?)\2(?![\w*])/g;

function make(tag, ...content) {
  const element = document.createElement(tag);
  element.append(...content);
  return element;
}

function spans(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(SPAN)) {
    const [whole, code, stars, words] = found;
    parts.push(text.slice(end, found.index));
    parts.push(code ? make("code", code) : make(stars.length === 1 ? "em" : "strong", ...spans(words)));
    end = found.index + whole.length;
  }
  return [...parts, text.slice(end)];
}

function draw(text) {
  const root = document.createDocumentFragment();
  const lists = []; // that are open, the outermost first
  let open = null; // what the next line goes on
  const add = (indent, element) => {
    if (!indent) lists.length = 0;
    (lists.at(-1)?.list.lastElementChild ?? root).append(element);
    return element;
  };
  const lines = text.split("\n");
  for (let n = 0; n < lines.length; n += 1) {
    const line = lines[n].trimStart();
    const indent = lines[n].length - line.length;
    const fence = /^(`{3,}|~{3,})/.exec(line)?.[0];
    const title = /^#{1,6}\s+(\S.*)/.exec(line);
    const item = /^(?:[-*+]|(\d{1,9})[.)])\s+(\S.*)/.exec(line);
    if (fence || line.startsWith("|")) {
      const within = fence ? [] : [lines[n]]; // a table stays as it is written
      const ends = (next) => (fence ? next.startsWith(fence) && !next.replaceAll(fence[0], "") : !next.startsWith("|"));
      while (n + 1 < lines.length && !ends(lines[n + 1].trim())) within.push(lines[(n += 1)]);
      n += fence ? 1 : 0;
      add(indent, make("pre", make("code", within.join("\n"))));
      open = null;
    } else if (title) {
      add(0, make("h3", ...spans(title[1])));
      open = null;
    } else if (item) {
      const tag = item[1] ? "ol" : "ul";
      while (lists.length && (lists.at(-1).indent > indent || (lists.at(-1).indent === indent && lists.at(-1).tag !== tag))) {
        lists.pop();
      }
      if (!lists.length || (lists.at(-1).indent < indent && lists.length < 6)) {
        lists.push({ indent, tag, list: add(lists.length, make(tag)) });
      }
      open = make("li", ...spans(item[2]));
      if (item[1]) open.value = item[1];
      lists.at(-1).list.append(open);
    } else if (!line) {
      open = null;
    } else if (open) {
      open.append("\n", ...spans(open.tagName === "LI" ? line : lines[n]));
    } else {
      open = add(indent, make("p", ...spans(lines[n])));
    }
  }
  return root;
}

const kept = (() => {
  try {
    return window.localStorage;
  } catch {
    return {}; // a browser may keep nothing
  }
})();
const rawButton = document.getElementById("raw");
const texts = [...document.querySelectorAll(".responses .text")].map((box) => [box, box.textContent]);

function showTexts() {
  for (const [box, text] of texts) {
    const raw = kept.raw === "yes" || text.length > MOST;
    box.classList.toggle("drawn", !raw);
    box.replaceChildren(raw ? text : draw(text));
  }
  rawButton.setAttribute("aria-pressed", kept.raw === "yes");
}

// An answer is about what was on the screen: its buttons wait until the first lines of each response were.
const unseen = new Set(document.querySelectorAll(".responses > section"));

function look() {
  const footer = document.querySelector("footer").getBoundingClientRect().top;
  for (const each of unseen) {
    const box = each.getBoundingClientRect();
    if (box.top + 60 <= footer && box.bottom > 0) unseen.delete(each);
  }
  for (const button of document.querySelectorAll("#answer button")) button.disabled = unseen.size > 0;
  document.getElementById("unseen").hidden = unseen.size === 0;
}

if (rawButton) {
  rawButton.hidden = false;
  rawButton.addEventListener("click", () => {
    kept.raw = kept.raw === "yes" ? "no" : "yes";
    showTexts();
    look();
  });
  showTexts();
  for (const event of ["scroll", "resize"]) window.addEventListener(event, look, { passive: true });
  look();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=radio]), textarea");
  if (typing && event.key === "Escape") {
    typing.blur();
    return;
  }
  if (typing || event.repeat || event.ctrlKey || event.altKey || event.metaKey) {
    return;
  }
  const key = event.key.toLowerCase();
  const skip = document.getElementById("skip");
  const critique = document.getElementById("critique");
  if (key === "c" && critique) {
    critique.focus();
    event.preventDefault();
    return;
  }
  if (key === "s" && skip) {
    skip.open = true;
    skip.querySelector("input[type=radio]").focus();
    event.preventDefault();
    return;
  }
  const special = { u: "#undo button", r: "#raw" };
  const button = document.querySelector(special[key] ?? `[data-key="${CSS.escape(key)}"]`);
  if (button) {
    event.preventDefault();
    button.click();
  }
});
