"""Two people label 50 pairs in a real browser, one by keyboard and one by mouse, while the server is killed.

Needs the package playwright, and Chromium: `playwright install chromium`, or its path in ALPACAFARM_CHROMIUM. With
ALPACAFARM_SCREENSHOTS, a folder, the page is drawn there, wide and narrow.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from command_files import read, write
from human_pairs import HOSTILE, MARKDOWN, SCRIPT

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
NUM = 50
SKIPPED = {"Ann": {7}, "Bob": {11, 30}}


def pairs():
    """GPT-4 prefers output_1 of the even ones; each output says its number and which one it is."""
    rows = [{"id": n, "instruction": f"Ask {n} {SCRIPT}", "input": "x" * (n % 2)} for n in range(NUM)]
    texts = [("one" + " word" * (n % 9), f"two\n- item\n{SCRIPT}" if n % 3 else "two") for n in range(NUM)]
    outputs = [{"output_1": a, "output_2": b} for a, b in texts]
    judged = [{"preference": 1 + n % 2, "annotator": "gpt4"} for n in range(NUM)]
    return [{**row, **two, **said} for row, two, said in zip(rows, outputs, judged, strict=True)]


def opinion(name, n):
    """(better, slightly): Ann contradicts GPT-4 on every fifth pair, Bob always takes the first."""
    better = (2 - n % 2 if n % 5 == 0 else 1 + n % 2) if name == "Ann" else 1
    return better, n % 4 == 0


class Command:
    """The command in a process of its own, always at the same address."""

    def __init__(self, folder):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        out = folder / "labels.json"
        options = ["--out", str(out), "--port", str(port), "--no-browser", "--seed", "0"]
        self.args = [sys.executable, "-m", "alpacafarm_env", "annotate-human", str(folder / "pairs.json"), *options]
        self.starts = 0
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            self.args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.url = self.process.stdout.readline().strip()
        self.starts += 1

    def kill(self):
        self.process.kill()
        self.process.communicate()
        self.start()

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=60)


@pytest.fixture
def command(tmp_path):
    write(tmp_path / "pairs.json", pairs())
    running = Command(tmp_path)
    yield running
    running.process.kill()
    running.process.communicate()


@pytest.fixture(scope="module")
def browser():
    found = os.environ.get("ALPACAFARM_CHROMIUM")
    with sync_api.sync_playwright() as driver:
        try:
            opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


class Person:
    """Somebody at the page, who keeps what the console says and whom the browser asks."""

    def __init__(self, browser, command, name):
        self.name, self.command = name, command
        self.page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.told, self.hosts = [], set()
        self.page.on("console", lambda message: self.told.append(message.text))
        self.page.on("pageerror", lambda error: self.told.append(str(error)))
        self.page.on("dialog", lambda dialog: self.told.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname))
        self.page.goto(command.url)

    def current(self):
        """The number of the pair that is shown, and the output shown first; None at the end."""
        if not self.page.locator("#answer").count():
            return None
        texts = self.page.locator(".text").all_inner_texts()
        assert SCRIPT in texts[1]
        return int(texts[1].split()[1]), 1 if texts[2].startswith("one") else 2

    def done(self):
        return int(self.page.title().split()[0])

    def wait_for(self, num_done):
        """By the title, for a function would be evaluated anew, which the page's policy forbids."""
        sync_api.expect(self.page).to_have_title(re.compile(f"^{num_done} of"))
        self.page.wait_for_load_state()

    def step(self):
        """Answers or skips what is shown; False at the end."""
        shown = self.current()
        if shown is None:
            return False
        before = self.done()
        self.page.wait_for_timeout(350)  # nobody answers sooner
        if shown[0] in SKIPPED[self.name]:
            self.skip()
        else:
            self.choose(self.choice(*shown))
        self.wait_for(before + 1)
        return True

    def choice(self, number, first):
        better, slightly = opinion(self.name, number)
        return (2 if slightly else 1) if better == first else (3 if slightly else 4)

    def send(self):
        """Answers without waiting: whether that arrives is a matter of milliseconds."""
        self.page.wait_for_timeout(350)
        if (shown := self.current()) and shown[0] not in SKIPPED[self.name]:
            click = "(key) => setTimeout(() => document.querySelector(key).click())"
            self.page.evaluate(click, f"[data-key='{self.choice(*shown)}']")

    def forgive_lost_connections(self):
        self.told = [text for text in self.told if "net::ERR_" not in text]


class Typist(Person):
    """Has no mouse."""

    def begin(self):
        self.page.keyboard.type(self.name)
        self.page.keyboard.press("Enter")
        self.page.wait_for_selector("#answer")

    def choose(self, choice):
        self.page.keyboard.press(str(choice))

    def rate(self, rating, words):
        if words:
            self.page.keyboard.press("c")
            self.page.keyboard.type(words)
            self.page.keyboard.press("Escape")
        self.page.keyboard.press(str(rating))

    def skip(self):
        self.page.keyboard.press("s")
        self.page.keyboard.press("ArrowDown")
        self.page.keyboard.press("Enter")

    def undo(self):
        self.page.keyboard.press("u")


class Clicker(Person):
    """Has no keyboard, but for the name."""

    def begin(self):
        self.page.locator("#name").fill(self.name)
        self.page.get_by_role("button", name="Begin").click()
        self.page.wait_for_selector("#answer")

    def choose(self, choice):
        self.page.locator(f"[data-key='{choice}']").click()

    def rate(self, rating, words):
        self.page.locator("#critique").fill(words)
        self.choose(rating)

    def skip(self):
        self.page.locator("#skip > summary").click()
        self.page.get_by_label("Both are equally good").check()
        self.page.get_by_role("button", name="Skip this pair").click()

    def undo(self):
        box = self.page.locator("#undo button").bounding_box()
        place = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.page.mouse.click(*place)
        self.page.wait_for_timeout(60)  # a double click takes back one
        self.page.mouse.click(*place)


def test_fifty_pairs_by_two_people_with_kills_and_reloads(browser, command, tmp_path, capsys):
    people = [Typist(browser, command, "Ann"), Clicker(browser, command, "Bob")]
    for person in people:
        person.begin()
    started, turn = time.monotonic(), 0
    while sum(person.step() for person in people):
        turn += 1
        if turn % 8 == 3:
            undoing = people[turn % 16 > 8]
            before = undoing.done()
            undoing.page.wait_for_timeout(350)
            undoing.undo()
            undoing.wait_for(before - 1)
        if turn % 12 == 5:
            known = [person.done() for person in people]
            command.kill()
            for person in people:
                person.page.reload()
                person.forgive_lost_connections()
            assert [person.done() for person in people] == known
        if turn % 12 == 11:
            for person in people:
                person.send()
            command.kill()
            for person in people:
                person.page.goto(f"{command.url}work?name={person.name}")
                person.forgive_lost_connections()
        if turn % 5 == 0:
            people[1].page.reload()
    seconds = time.monotonic() - started
    assert all(person.page.get_by_text("All done").count() for person in people)
    report, errors = command.stop()
    rows = read(tmp_path / "labels.json")
    said = {(row["annotator"], row["id"]): (row["preference"], row["raw_preference"] in (2, 3)) for row in rows}
    wanted = {(name, n): opinion(name, n) for name in SKIPPED for n in range(NUM) if n not in SKIPPED[name]}
    assert len(rows) == len(said)
    assert said == wanted
    skipped = Counter(row["annotator"] for row in read(tmp_path / "labels_skipped.json"))
    assert skipped == {name: len(numbers) for name, numbers in SKIPPED.items()}
    first = [sum(row["shown_first"] == "output_1" for row in rows if row["annotator"] == name) for name in SKIPPED]
    assert all(abs(2 * num - NUM) < 4 * NUM**0.5 for num in first)
    lines = {line.split()[0]: line for line in report.splitlines() if line.strip()}
    # By hand: Ann agrees on 40 of 50 pairs, 39 of the 49 she labelled; Bob on the even ones, 24 of 48.
    assert "80% [66%, 89%] of 49" in lines["Ann"]
    assert "50% [36%, 64%] of 48" in lines["Bob"]
    assert lines["Bob"].endswith("near chance")
    assert not lines["Ann"].endswith("near chance")
    for person in people:
        assert person.told == []
        assert person.hosts == {"127.0.0.1"}
    assert errors == ""
    with capsys.disabled():
        print(f"\n{len(rows)} labels in {seconds:.0f} s, {command.starts - 1} kills, output_1 first {first} of 50")


def singles():
    return [{"id": n, "instruction": f"Ask {n} {SCRIPT}", "output": f"say {n} " * 40 + SCRIPT} for n in range(12)]


def test_responses_are_rated_with_words_by_two_people_over_a_kill(browser, tmp_path):
    """The words hold every key that means something outside of them."""
    command = Command(write(tmp_path / "pairs.json", singles()).parent)
    people = [Typist(browser, command, "Ann"), Clicker(browser, command, "Bob")]
    for person in people:
        person.begin()
    for turn in range(12):
        for person in people:
            before = person.done()
            number = int(person.page.locator(".text").nth(1).inner_text().split()[1])
            person.page.wait_for_timeout(350)
            person.rate(1 + number % 7, f"s u c 1234567 {SCRIPT} {number}" if number % 2 else "")
            person.wait_for(before + 1)
        if turn == 5:
            people[0].page.wait_for_timeout(350)
            people[0].undo()
            people[0].wait_for(5)
            command.kill()
            for person in people:
                person.page.reload()
                person.forgive_lost_connections()
    assert people[0].done() == 11
    assert people[1].page.get_by_text("All done").count()
    command.stop()
    rows = read(tmp_path / "labels.json")
    assert len(rows) == 11 + 12
    for row in rows:
        words = f"s u c 1234567 {SCRIPT} {row['id']}" if row["id"] % 2 else ""
        assert (row["rating"], row["critique"]) == (1 + row["id"] % 7, words)
    for person in people:
        assert person.told == []
        assert person.hosts == {"127.0.0.1"}


def visit(browser, command, tmp_path, rows, size):
    """Somebody at the page of these pairs, and what the page holds of a kind."""
    write(tmp_path / "pairs.json", rows)
    command.kill()
    person = Typist(browser, command, "Ann")
    person.page.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
    person.begin()
    return person, lambda kind: person.page.locator(f".responses .text {kind}").all_inner_texts()


@pytest.mark.parametrize("size", [(1280, 800), (360, 740)])
def test_markdown_is_drawn_and_nothing_in_it_runs_loads_or_links(browser, command, tmp_path, size):
    row = {"instruction": "Ask", "output_1": MARKDOWN, "output_2": HOSTILE}
    person, drawn = visit(browser, command, tmp_path, [row], size)
    assert "A plan" in drawn("h3")
    assert drawn("strong")[0] == "Bold"
    assert drawn("em")[:1] == ["leaning"]
    assert drawn("ol > li")[1] == "fourth"
    assert person.page.locator("ol > li").first.get_attribute("value") == "3"
    assert "nested" in drawn("li > ul > li")
    assert '# no title\nx = "**no bold**"' in drawn("pre")
    assert any("2*3*4, a_b_c and <b>no HTML</b>" in text for text in drawn("p"))
    kinds = "e => [...new Set([...e.querySelectorAll('.text *')].map(x => x.tagName))]"
    found = person.page.locator(".responses").evaluate(kinds)
    assert set(found) <= {"P", "H3", "UL", "OL", "LI", "PRE", "CODE", "STRONG", "EM"}
    assert person.page.evaluate("document.documentElement.scrollWidth") <= size[0]
    person.page.keyboard.press("r")
    texts = person.page.locator(".responses .text").evaluate_all("e => e.map(x => x.textContent)")
    assert sorted(texts) == sorted([MARKDOWN, HOSTILE])
    person.page.reload()  # raw it stays
    assert drawn("h3") == []
    assert person.told == []
    assert person.hosts == {"127.0.0.1"}


def test_on_a_phone_the_pair_comes_first_and_is_answered_once_it_was_seen(browser, command, tmp_path):
    rows = [{"instruction": f"Ask {n}", "output_1": "one\n" * 40, "output_2": "two\n" * 40} for n in range(2)]
    person, _ = visit(browser, command, tmp_path, rows, (360, 740))
    footer = person.page.locator("footer").bounding_box()["y"]
    assert person.page.locator(".responses .text").first.bounding_box()["y"] < footer - 100
    buttons = person.page.locator("#answer button")
    assert buttons.evaluate_all("e => e.map(x => x.disabled)") == [True] * 4
    person.page.wait_for_timeout(350)
    person.choose(1)
    person.page.wait_for_timeout(200)
    assert person.done() == 0
    person.page.locator(".responses section").nth(1).evaluate("e => e.scrollIntoView()")
    sync_api.expect(buttons.first).to_be_enabled()
    person.choose(1)
    person.wait_for(1)


@pytest.mark.parametrize("rows", [pairs, singles])
@pytest.mark.parametrize(("kind", "size"), {"wide": (1280, 900), "narrow": (360, 780)}.items())
def test_nothing_of_the_page_is_cut_off(browser, command, kind, size, rows, tmp_path):
    write(tmp_path / "pairs.json", rows())
    command.kill()
    person = Typist(browser, command, "Ann")
    person.page.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
    person.begin()
    for _ in range(3 * (rows is pairs)):
        person.step()
    folder = os.environ.get("ALPACAFARM_SCREENSHOTS")
    if folder:
        person.page.screenshot(path=f"{folder}/{rows.__name__}_{kind}_answer.png")
    person.page.keyboard.press("s")
    width = person.page.evaluate("document.documentElement.scrollWidth")
    assert width <= size[0]
    assert person.page.locator("footer").bounding_box()["height"] < size[1] / 2
    for button in person.page.locator("button:visible, summary:visible").all():
        box = button.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0]
    if folder:
        person.page.screenshot(path=f"{folder}/{rows.__name__}_{kind}_skip.png")
