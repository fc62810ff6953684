"""evaluation.json: what is written is read again, later answers replace earlier ones, nothing odd is believed."""

import json
from dataclasses import replace

import pytest

from mosaic.format.errors import InputError
from mosaic.format.evaluation import EVALUATION_FILE, Perplexity, add_evaluation, read_evaluations
from support.evaluations import ALONE, COMPARED

DIGEST = "d" * 64


def test_there_and_back(tmp_path):
    assert read_evaluations(tmp_path, DIGEST) == ()
    add_evaluation(tmp_path, DIGEST, ALONE)
    add_evaluation(tmp_path, DIGEST, COMPARED)
    assert read_evaluations(tmp_path, DIGEST) == (ALONE, COMPARED)
    assert [file.name for file in tmp_path.iterdir()] == [EVALUATION_FILE]


def test_a_later_answer_replaces_the_earlier(tmp_path):
    for evaluation in (ALONE, COMPARED):
        add_evaluation(tmp_path, DIGEST, evaluation)
    later = replace(ALONE, perplexity=Perplexity(5.0, None), text="renamed.txt")
    add_evaluation(tmp_path, DIGEST, later)
    assert read_evaluations(tmp_path, DIGEST) == (COMPARED, later)
    for change in ({"context": 5}, {"tokens": 9}, {"kv": "f32"}, {"ops": "reference"}, {"text_sha256": "0"}):
        add_evaluation(tmp_path, DIGEST, replace(ALONE, **change))
    assert len(read_evaluations(tmp_path, DIGEST)) == 7


def test_another_conversion_is_another_model(tmp_path):
    add_evaluation(tmp_path, "e" * 64, ALONE)
    assert read_evaluations(tmp_path, DIGEST) == ()
    add_evaluation(tmp_path, DIGEST, COMPARED)
    assert read_evaluations(tmp_path, DIGEST) == (COMPARED,)
    assert read_evaluations(tmp_path, "e" * 64) == ()


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda value: value.update(version=2), "another version"),
        (lambda value: value.update(version=True), "another version"),
        (lambda value: value.pop("plan_digest"), "plan_digest"),
        (lambda value: value.update(more=1), "more"),
        (lambda value: value.update(evaluations={}), "evaluations"),
        (lambda value: value["evaluations"].append(5), "evaluations[2]"),
        (lambda value: value["evaluations"][0].update(tokens="many"), "tokens"),
        (lambda value: value["evaluations"][0]["perplexity"].update(value=float("nan")), "nan"),
        (lambda value: value["evaluations"][1]["comparison"]["divergence"].update(maximum=float("inf")), "inf"),
        (lambda value: value["evaluations"][1]["comparison"].update(dtypes=[1]), "dtypes[0]"),
        (lambda value: value["evaluations"][0].update(context=10**400), "the number 1000"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, change, shown):
    for evaluation in (ALONE, COMPARED):
        add_evaluation(tmp_path, DIGEST, evaluation)
    value = json.loads((tmp_path / EVALUATION_FILE).read_text())
    change(value)
    (tmp_path / EVALUATION_FILE).write_text(json.dumps(value))
    with pytest.raises(InputError) as refusal:
        read_evaluations(tmp_path, DIGEST)
    assert shown in str(refusal.value)
    assert "remove it" in refusal.value.facts["remedy"]
    with pytest.raises(InputError):
        add_evaluation(tmp_path, DIGEST, ALONE)
