"""lm-eval over mosaic-serve: log-likelihoods through /v1/completions, answers through /v1/chat/completions."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mosaic.recipes import demo_model
from mosaic.runtime import Engine

pytestmark = pytest.mark.slow  # lm-eval brings half a gigabyte of packages with it

CHOICES = [
    {"query": "And the LORD said unto", "choices": [" Moses", " piano", " Bingley"], "gold": 0},
    {"query": "Mr. Darcy looked at", "choices": [" Pharaoh", " Elizabeth", " the ark"], "gold": 1},
    {"query": "It is a truth universally", "choices": [" acknowledged", " begat", " of of"], "gold": 0},
    {"query": "In the beginning God", "choices": [" Emma", " Weston", " created"], "gold": 2},
]
QUESTIONS = [{"query": "Tell me about Ruth 1."}, {"query": "Tell me about the sea."}]
MOST = 12  # tokens of an answer


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    program = str(Path(sys.executable).with_name("mosaic-serve"))
    server = subprocess.Popen(
        [program, str(demo_model()), "--port", "0", "--alias", "demo", "--parallel", "2", "--context", "512"],
        stdout=subprocess.PIPE,
        text=True,
    )
    yield re.search(r"http://\S+", server.stdout.readline())[0].rstrip("/")
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    server.stdout.close()


def evaluate(folder: Path, model: str, address: str, task: dict, documents: list[dict]) -> dict:
    """What lm-eval finds, its samples included."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{query}}",
        "num_fewshot": 0,
        **task,
    }
    settings = {
        "model": "demo",
        "base_url": address,
        "tokenizer": str(demo_model()),
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 512,
    }
    chat = model == "local-chat-completions"
    return simple_evaluate(
        model=model,
        model_args=settings,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        batch_size=1 if chat else 2,
        apply_chat_template=chat,
        bootstrap_iters=0,
    )


def test_log_likelihoods(address, tmp_path):
    """Every number that lm-eval was given is what our engine says of the same tokens."""
    task = {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    found = evaluate(tmp_path, "local-completions", f"{address}/v1/completions", task, CHOICES)
    engine = Engine.load(demo_model(), context=512)
    for sample in found["samples"]["tiny"]:
        document = sample["doc"]
        expected = [sum(engine.score(document["query"], choice)) for choice in document["choices"]]
        told = [float(response[0][0]) for response in sample["resps"]]
        assert told == pytest.approx(expected, abs=0.02)  # they are read in company: bfloat16 keys may round otherwise
        assert sample["acc"] == (max(range(3), key=expected.__getitem__) == document["gold"])
    assert found["results"]["tiny"]["acc,none"] >= 0.75


def test_answers(address, tmp_path):
    task = {
        "output_type": "generate_until",
        "doc_to_target": "",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": MOST, "temperature": 0.0},
        "metric_list": [{"metric": "bypass"}],
    }
    url = f"{address}/v1/chat/completions"
    found = evaluate(tmp_path, "local-chat-completions", url, task, QUESTIONS)
    engine = Engine.load(demo_model(), context=512)
    for sample in found["samples"]["tiny"]:
        messages = [{"role": "user", "content": sample["doc"]["query"]}]
        expected = engine.chat(messages, max_tokens=MOST, temperature=0.0, stop=["\n\n"])["content"]
        assert sample["resps"][0][0] == expected
