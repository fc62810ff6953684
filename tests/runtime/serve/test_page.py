"""The chat page in a real browser, against a server that does what a script says."""

import json
import random
import re
import time

import pytest

from support.browser import answered, ask, chromium, converse, opened
from support.fake_server import DONE, KEY, Break, FakeServer, Gate, Refusal, delta, event, serving, usage, whole


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server():
    with serving(FakeServer()) as fake:
        yield fake


@pytest.fixture
def fake(server):
    server.reset()
    return server


@pytest.fixture(scope="module")
def tab(browser, server):
    with opened(browser, server.address) as page:
        yield page


@pytest.fixture
def page(tab, fake):
    """The page as it is the first time."""
    tab.goto(f"{fake.address}page/icon.svg")
    tab.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    tab.goto(fake.address)
    tab.get_by_role("heading", name="some-model").wait_for()
    return tab


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


def until(page, condition, seconds=5):
    """Asked from here: the page's policy lets nothing evaluate strings in it, not even the test's own waiting."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


def last_answer(page):
    return page.locator(".answer > .markdown").last


def roles(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_a_whole_conversation(page, fake, tmp_path):
    """The same talk is to be had with any server; here the answers are known too."""
    fake.scripts.extend(whole(f"Answer {text}.") for text in ("one", "two", "one", "one"))
    converse(page, tmp_path / "talk.json")
    said = json.loads((tmp_path / "talk.json").read_text())
    assert said == {
        "version": 1,
        "model": "some-model",
        "settings": {"temperature": 0, "max_tokens": 24, "thinking": "off"},
        "messages": [
            {"role": "user", "content": "Tell me about Ruth 1."},
            {"role": "assistant", "content": "Answer one."},
        ],
    }
    assert page.title() == "some-model"
    assert [roles(body) for body in fake.bodies[1:3]] == [
        [("user", "Tell me about Ruth 1."), ("assistant", "Answer one."), ("user", "And then?")],
        [("user", "Tell me about Ruth 1.")],
    ]
    assert fake.bodies[0]["stream_options"] == {"include_usage": True}


AWKWARD = "Grüße 👩‍👩‍👧 \u2028漢字 e\u0301 ש data: x\n\nlast"


def test_events_are_exact_however_the_bytes_are_cut(tab):
    lines = [
        b": comment",
        b"event: x",
        b"data:{}",
        b"",
        b"",
        b"data: " + AWKWARD.replace("\n", "\\n").encode(),
        b"",
        b"data: a",
        b"data:",
        b"data:  b",
        b"id: 1",
        b"",
        b"database: no",
        b"data: incomplete",
    ]
    streams = [end.join(lines) + end for end in (b"\n", b"\r\n", b"\r")]
    found = tab.evaluate(
        """async ([streams, sizes]) => {
            const { events } = await import("/page/sse.js");
            const cut = (bytes, size) => new ReadableStream({ start(controller) {
                for (let at = 0; at < bytes.length; at += size)
                    controller.enqueue(new Uint8Array(bytes.slice(at, at + size)));
                controller.close();
            } });
            const found = streams.flatMap((bytes) => sizes.map((size) => Array.fromAsync(events(cut(bytes, size)))));
            return await Promise.all(found);
        }""",
        [[list(stream) for stream in streams], [1, 2, 3, 7, 50, 1000]],
    )
    assert found == [["{}", AWKWARD.replace("\n", "\\n"), "a\n\n b"]] * 18


def test_an_answer_cut_within_characters(page, fake):
    text = f"{AWKWARD} \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")
    stream = b": hello\r\n\r\n" + b"".join(delta(content=char) for char in text) + b"".join(whole(""))
    fake.scripts.append([stream[at : at + 5] for at in range(0, len(stream), 5)])
    ask(page, "?")
    answered(page)
    page.reload()  # also what is kept of it
    shown = page.evaluate("document.querySelector('.answer > .markdown').textContent")
    assert shown == text.replace("\n\n", "")


def test_what_is_set_is_sent_and_kept(page, fake):
    page.get_by_role("button", name="Settings").click()
    values = {"System prompt": "Be brief.", "Temperature": "0.6", "Top p": "0.9", "Top k": "20", "Seed": "7"}
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Thinking").select_option("off")
    page.get_by_label("Max tokens").fill("-5")
    page.get_by_role("button", name="Done").click()
    assert page.get_by_role("dialog").is_visible()  # -5 is not valid: the browser says so
    page.keyboard.press("Escape")
    page.reload()
    fake.scripts.append(whole("Yes."))
    ask(page, "Hello")
    answered(page)
    body = fake.bodies[0]
    assert roles(body) == [("system", "Be brief."), ("user", "Hello")]
    for name in ("messages", "stream", "stream_options"):
        body.pop(name)
    assert body == {
        "model": "some-model",
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 7,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("button", name="Done").click()
    fake.scripts.append(whole("Yes."))
    ask(page, "Hello")
    answered(page)
    assert not {"temperature", "seed", "chat_template_kwargs"} & set(fake.bodies[1])
    assert roles(fake.bodies[1])[0] == ("user", "Hello")


def test_thinking_is_folded_and_timed(page, fake):
    thinking, writing = Gate(), Gate()
    fake.scripts.append([delta(), delta(reasoning="Let me **see**"), thinking, delta("So"), writing, *whole(".")[1:]])
    ask(page, "?")
    fold = page.locator("details.reasoning")
    page.locator("summary", has_text=re.compile(r"^Thinking… \d+ s$")).wait_for()
    assert not fold.locator("strong").is_visible()
    page.locator("summary").click()
    assert fold.locator("strong").inner_text() == "see"
    thinking.open()
    page.locator("summary", has_text=re.compile(r"^Thought for [\d.]+ s$")).wait_for()
    assert page.locator(".status").inner_text() == "Writing…"
    writing.open()
    answered(page)
    assert last_answer(page).inner_text() == "So."
    fake.scripts.append(whole("Well."))
    ask(page, "!")
    answered(page)
    assert fake.bodies[1]["messages"][1] == {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "Let me **see**",
    }


def test_figures(page, fake):
    fake.scripts.append([delta(), delta("a"), delta("b", end="length"), usage(1204, 310, 1100), DONE])
    ask(page, "?")
    answered(page)
    assert re.fullmatch(
        r"1,204 prompt tokens \(1,100 cached\) · first token after [\d.]+ s · 310 tokens( · [\d.]+ tok/s)? · "
        "cut at max tokens or the end of the context",
        page.locator(".status").inner_text(),
    )


def test_stop_keeps_what_came(page, fake):
    fake.scripts.append([delta(), delta("Once upon"), Gate(), delta(" a time")])
    ask(page, "A story")
    page.get_by_text("Once upon").wait_for()
    ask(page, "not sent while an answer is written")
    page.get_by_role("button", name="Stop").click()
    answered(page)
    assert fake.gone.wait(5)  # the server knows
    assert "stopped" in page.locator(".status").inner_text()
    assert page.get_by_label("Message", exact=True).input_value() == "not sent while an answer is written"
    fake.scripts.append(whole("a time."))
    ask(page, "Go on")
    answered(page)
    assert roles(fake.bodies[1]) == [("user", "A story"), ("assistant", "Once upon"), ("user", "Go on")]


def test_a_stopped_prompt_leaves_no_empty_message(page, fake):
    fake.scripts.append([delta(), Gate()])
    ask(page, "A story")
    page.get_by_text("Reading the prompt").wait_for()
    page.get_by_role("button", name="Stop").click()
    answered(page)
    fake.scripts.append(whole("Once."))
    ask(page, "Go on")
    answered(page)
    assert roles(fake.bodies[1]) == [("user", "A story"), ("user", "Go on")]


def test_an_edit_goes_on_from_there_even_while_an_answer_is_written(page, fake):
    fake.scripts.extend([whole("One."), whole("Two."), [delta(), delta("Thr"), Gate()]])
    for question in ("1", "2"):
        ask(page, question)
        answered(page)
    ask(page, "3")
    page.get_by_text("Thr").wait_for()
    page.get_by_role("button", name="Edit").nth(1).click()
    area = page.get_by_label("Edit the message")
    area.press("Escape")
    assert texts(page, ".user .text") == ["1", "2", "3"]
    page.get_by_role("button", name="Edit").nth(1).click()
    fake.scripts.append(whole("Two, again."))
    area.fill("2 and\na half")
    area.press("Enter")
    page.get_by_text("Two, again.").wait_for()
    answered(page)
    assert roles(fake.bodies[3]) == [("user", "1"), ("assistant", "One."), ("user", "2 and\na half")]
    assert texts(page, ".user .text") == ["1", "2 and\na half"]


def test_keys(page, fake):
    area = page.get_by_label("Message", exact=True)
    fake.scripts.append(whole("Yes."))
    area.press("Enter")  # nothing to send
    area.press_sequentially("one")
    area.press("Shift+Enter")
    area.press_sequentially("two")
    area.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    assert not fake.bodies
    area.press("Enter")
    answered(page)
    assert roles(fake.bodies[0]) == [("user", "one\ntwo")]
    assert area.evaluate("area => area === document.activeElement")


ERRORS = [
    (Refusal(429, headers={"retry-after": "7"}), "The server is busy: said why. Try again in 7 s."),
    (Refusal(500), "The server failed: said why."),
    (Refusal(502, None), "The server failed: HTTP 502 Bad Gateway."),
    (Refusal(400, "messages: too long."), "The server refused this: messages: too long."),
    (Refusal(503, "too many requests"), "The server is not ready: too many requests."),
    ([delta("Some"), event({"error": {"message": "no memory"}}), DONE], "The server gave up: no memory"),
    ([delta("Some"), Gate(), Break], "The connection ended before the answer was complete."),
    ([delta("Some"), delta(" more")], "The connection ended before the answer was complete."),
    ([delta("Some"), b"data: {oops\n\n"], "The server sent something that is not its API."),
]


def test_errors_are_told_and_what_came_stays(page, fake):
    for script, told in ERRORS:
        fake.scripts.append(script)
        ask(page, "?")
        if isinstance(script, list) and Break in script:  # with it a browser drops what has not been read
            last_answer(page).get_by_text("Some").wait_for()
            script[1].open()
        answered(page)
        assert page.get_by_role("alert").locator("p").last.inner_text() == told
        assert last_answer(page).inner_text().startswith("Some" if isinstance(script, list) else "")


def test_what_failed_is_tried_again_even_after_a_reload(page, fake):
    fake.scripts.extend([[delta("Some"), Break], whole("Well.")])
    ask(page, "?")
    answered(page)
    page.reload()
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("Well.").wait_for()
    answered(page)
    assert texts(page, ".answer > .markdown") == ["Well."]
    assert roles(fake.bodies[-1]) == [("user", "?")]
    assert not page.get_by_role("alert").count()


def test_a_server_that_is_not_there(page):
    page.route("**/v1/**", lambda route: route.abort(), times=1)
    ask(page, "?")
    answered(page)
    assert page.get_by_role("alert").locator("p").inner_text() == "The server cannot be reached. Is it running?"


def test_a_server_that_is_loading_is_waited_for(browser, fake):
    fake.models.append(Refusal(503, "the model is being loaded", {"retry-after": "1"}))
    with opened(browser, fake.address) as page:
        page.get_by_text("The server is not ready: the model is being loaded. Try again in 1 s.").wait_for()
        page.get_by_role("heading", name="some-model").wait_for()
        assert not page.locator("#notice").is_visible()


def test_the_key_is_asked_for_and_forgotten_with_the_tab(browser, fake):
    fake.key_needed = True
    fake.scripts.append(whole("Yes."))
    with opened(browser, fake.address) as page:
        field = page.get_by_label("This server asks for an API key:")
        field.fill("wrong-key")
        field.press("Enter")
        ask(page, "?")
        answered(page)
        assert page.get_by_role("alert").locator("p").inner_text() == (
            "The server asks for an API key: no valid API key was given."
        )
        field.fill(KEY)
        field.press("Enter")  # and what failed is tried again
        page.get_by_text("Yes.").wait_for()
        page.get_by_role("heading", name="some-model").wait_for()
        assert not field.is_visible()
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")
        page.reload()
        page.get_by_role("heading", name="some-model").wait_for()


def test_a_new_chat(page, fake):
    fake.scripts.append(whole("Yes."))
    assert page.get_by_role("button", name="New chat").is_disabled()
    ask(page, "?")
    answered(page)
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("Ask something.").wait_for()
    page.reload()
    assert not page.locator(".turn").count()


def test_copying(browser, fake):
    """With the clipboard of browsers, and where a page that is not local nor encrypted has none."""
    fake.scripts.append(whole("Code:\n\n```py\nif x:\n\ty = 1\n```\n"))
    with opened(browser, fake.address, permissions=["clipboard-read", "clipboard-write"]) as page:
        ask(page, "?")
        answered(page)
        read = "navigator.clipboard.readText()"
        page.locator(".fence").get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate(read) == "if x:\n\ty = 1"
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error()); }")
        page.locator(".answer > .tools").get_by_role("button", name="Copy").click()
        page.locator(".answer > .tools").get_by_role("button", name="Copied").wait_for()
        assert page.evaluate(read) == "Code:\n\n```py\nif x:\n\ty = 1\n```\n"


def test_scrolling_follows_only_from_the_end(page, fake):
    first, second = Gate(), Gate()
    lines = "word\n\n" * 60
    fake.scripts.append([delta(), delta(lines), first, delta(lines), second, delta(lines), *whole("")[3:]])
    bottom = "log.scrollHeight - log.scrollTop - log.clientHeight < 2"
    ask(page, "?")
    until(page, f"log.scrollHeight > 2 * log.clientHeight && {bottom}")
    first.open()
    until(page, f"document.querySelectorAll('p').length > 120 && {bottom}")
    page.evaluate("log.scrollTop = 100")
    second.open()
    answered(page)
    assert page.evaluate("log.scrollTop") == 100
    page.get_by_role("button", name="Go to the end").click()
    until(page, f"{bottom} && down.hidden")


def test_the_page_parses_no_html_and_evaluates_no_text(page):
    """By its own policy, whatever a server's headers say: both attempts throw."""
    caught = "(() => { try { %s; } catch (error) { return error.name; } })()"
    assert page.evaluate(caught % "document.body.innerHTML = '<p>'") == "TypeError"
    timer = page.evaluate(
        "new Promise((done) => { window.hit = done; try { setTimeout('hit(1)'); } catch { done(0); } })"
    )
    assert timer == 0


MARKDOWN = [
    ("a **b** *c* `d*` __e__ _f_ ***g*** *h **i** j*", "<p>a <strong>b</strong> <em>c</em> <code>d*</code> "
     "<strong>e</strong> <em>f</em> <em><strong>g</strong></em> <em>h <strong>i</strong> j</em></p>"),
    ("a_b_c 2 * 3 * 4 **x*y** **p", "<p>a_b_c 2 * 3 * 4 <strong>x*y</strong> **p</p>"),
    (r"\*x\* \( y \) \\ `` a`b ``", r"<p>*x* \( y \) \\ <code>a`b</code></p>"),
    ("**テスト。**テスト", "<p><strong>テスト。</strong>テスト</p>"),
    ("# One ##\ntwo\nthree\n\n---\nfour", "<h3>One</h3><p>two\nthree</p><hr><p>four</p>"),
    ("#no\n####### no\n1986. no", "<p>#no\n####### no\n1986. no</p>"),
    ("- a\n- b\n  - c\n\n  d\n1. e\n  * f\n2. g", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul><p>d</p>"
     '</li></ul><ol start="1"><li><p>e</p><ul><li><p>f</p></li></ul></li><li><p>g</p></li></ol>'),
    ("3. a\n\n3. b\nlazy", '<ol start="3"><li><p>a</p></li><li><p>b\nlazy</p></li></ol>'),
    ("> a\nb\n> > c\n\nd", "<blockquote><p>a\nb</p><blockquote><p>c</p></blockquote></blockquote><p>d</p>"),
    ("|a|b|\n|-|:-:|\n|`x\\|y`|\n\nz", "<table><thead><tr><th>a</th><th class=\"center\">b</th></tr></thead><tbody><tr>"
     '<td><code>x|y</code></td><td class="center"></td></tr></tbody></table><p>z</p>'),
    ("[a](https://b.c/d_(e)) <https://f.g> (http://h.i/j_k).", '<p><a href="https://b.c/d_(e)">a</a> &lt;'
     '<a href="https://f.g">https://f.g</a>&gt; (<a href="http://h.i/j_k">http://h.i/j_k</a>).</p>'),
    ("[a](javascript:alert(1)) [b](//c.d) [e](data:text/html,f)",
     "<p>[a](javascript:alert(1)) [b](//c.d) [e](data:text/html,f)</p>"),
    ("<script>alert(1)</script>\n<img src=x onerror=alert(1)> &lt;", "<p>&lt;script&gt;alert(1)&lt;/script&gt;\n"
     "&lt;img src=x onerror=alert(1)&gt; &amp;lt;</p>"),
]  # fmt: skip

RENDER = """async ([texts, cuts]) => {
    const { Markdown } = await import("/page/markdown.js");
    return texts.map((text, index) => {
        const root = document.createElement("div");
        const markdown = new Markdown(root);
        let start = 0;
        for (const end of [...cuts[index], text.length]) markdown.append(text.slice(start, start = end));
        markdown.finish();
        return root.innerHTML;
    });
}"""


def test_markdown(tab):
    rendered = tab.evaluate(RENDER, [[text for text, _ in MARKDOWN], [[]] * len(MARKDOWN)])
    noise = r'</?span>| dir="auto"|</?div[^>]*>| target="_blank" rel="noopener noreferrer"'
    for (_, expected), found in zip(MARKDOWN, rendered, strict=True):
        assert re.sub(noise, "", found) == expected


def test_code_blocks(tab):
    text = "1. a\n   ```c++ x\n   if (<b>)\n\n     - **c**\n   ```\n   d\n~~~\n```\nopen"
    tab.evaluate(
        """async (text) => {
            const { Markdown } = await import("/page/markdown.js");
            document.getElementById("turns").className = "markdown";
            const markdown = new Markdown(document.getElementById("turns"));
            markdown.append(text);
            markdown.finish();
        }""",
        text,
    )
    assert texts(tab, "pre") == ["if (<b>)\n\n  - **c**", "```\nopen"]
    assert texts(tab, ".bar span") == ["c++", ""]
    assert tab.locator("li pre").count() == 1


PARTS = [
    *("word", " ", "  ", "\n", "\n\n", "\n    ", "\n  ", "- ", "* ", "1. ", "2) ", "> ", "# ", "### ", "---", "***"),
    *("```", "```py\n", "\n```\n", "~~~", "`", "``", "**", "*", "_", "__", "|", "| a | b |", "\n|---|:-:|\n", "\\"),
    *(
        "[x](https://a.b)",
        "[",
        "](",
        ")",
        "https://c.d/e_f.",
        "<b>",
        "&amp;",
        "👩‍👧",
        "ש",
        "漢",
        "\t",
        "\r\n",
        ":",
        "-",
    ),
]


def test_markdown_is_the_same_however_it_comes(tab):
    """Cut anywhere: what a preview showed leaves no trace. Paragraphs longer than a piece included."""
    random.seed(5)
    samples = ["".join(random.choices(PARTS, k=random.randint(1, 40))) for _ in range(400)]
    samples += [text for text, _ in MARKDOWN]
    samples += ["".join(random.choices(["word ", "**b** ", "x" * 700, "*", "\n", "👩"], k=60)) for _ in range(10)]
    at_once = tab.evaluate(RENDER, [samples, [[]] * len(samples)])
    lengths = [len(text.encode("utf-16-le")) // 2 for text in samples]
    for step in (1, 2, 7):
        cuts = [list(range(step, length, step if length < 3000 else 97 * step)) for length in lengths]
        found = tab.evaluate(RENDER, [samples, cuts])
        for text, one, other in zip(samples, found, at_once, strict=True):
            assert one == other, text
    kinds = "".join(at_once)
    assert all(
        f"<{tag}" in kinds for tag in ("ul", "ol", "blockquote", "pre", "table", "strong", "em", "a ", "h3", "hr")
    )


def test_only_the_last_block_changes(tab):
    """100 KB, a few characters at a time: the work grows as the text does."""
    block = "A paragraph with **bold** words.\n\n- one\n- two\n\n```py\nx = 1\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n"
    kinds = {
        "blocks": block * 500,
        "code": "```\n" + "some_code(1, 2)\n" * 3000,
        "list": "- an item of a list\n" * 2500,
        "table": "|a|b|\n|-|-|\n" + "|one|two|\n" * 2500,
        "one line": "word " * 20000,
        "heading": "# " + "word " * 20000,
        "spaces": "- a" + " " * 60000 + "b",
    }
    written = tab.evaluate(
        """async (kinds) => {
            const { Markdown } = await import("/page/markdown.js");
            const written = {};
            for (const [kind, text] of Object.entries(kinds)) {
                const root = document.createElement("div");
                const observer = new MutationObserver(() => {});
                observer.observe(root, { childList: true, subtree: true, characterData: true });
                const markdown = new Markdown(root);
                written[kind] = 0;
                for (let at = 0; at < text.length; at += 40) {
                    markdown.append(text.slice(at, at + 40));
                    for (const { type, addedNodes } of observer.takeRecords())
                        for (const node of addedNodes) written[kind] += node.textContent.length;
                }
                markdown.finish();
                written[kind] /= text.length;
            }
            return written;
        }""",
        kinds,
    )
    for kind in ("one line", "heading", "spaces"):
        assert written.pop(kind) < 4000 / 40  # a piece is drawn again until it is complete
    assert all(times < 10 for times in written.values()), written


def test_a_long_answer_arrives_whole(page, fake):
    words = [f"w{number} " for number in range(15000)]
    chunks = (delta("".join(some)) for some in zip(*[iter(words)] * 5, strict=True))
    fake.scripts.append([*chunks, *whole("end")])
    ask(page, "?")
    answered(page, 20)
    assert last_answer(page).inner_text() == "".join(words) + "end"


def test_right_to_left(page, fake):
    fake.scripts.append(whole("שלום עולם\n\nHello\n\n- אחת\n\n```\ncode\n```\n"))
    ask(page, "مرحبا")
    answered(page)
    direction = "element => getComputedStyle(element).direction"
    assert page.locator(".user .text").evaluate(direction) == "rtl"
    blocks = page.locator(".answer > .markdown > *")
    assert [block.evaluate(direction) for block in blocks.all()] == ["rtl", "ltr", "rtl", "ltr"]


def test_a_phone(browser, fake):
    fake.scripts.append(whole(f"|{'wide|' * 30}\n|{'-|' * 30}\n\n```\n{'long ' * 60}\n```\n\n{'x' * 300}"))
    with opened(browser, fake.address, viewport={"width": 360, "height": 640}, has_touch=True) as page:
        ask(page, "y" * 300)
        answered(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate("log.scrollWidth <= log.clientWidth")
        for name in ("New chat", "Export", "Settings", "Send"):
            box = page.get_by_role("button", name=name, exact=True).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
