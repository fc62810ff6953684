"""The server as a process: what it prints, how it ends."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.serving import PATIENCE

TESTS = Path(__file__).parents[2]
COMPLETIONS = "/v1/completions"


class Process:
    """A server of a scripted engine."""

    def __init__(self, folder: Path, grace: float, how: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, TESTS / "support" / "scripted_server.py", folder, str(grace), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        self.url = ""

    def listening(self) -> None:
        assert self.popen.stdout
        line = self.popen.stdout.readline()
        found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line
        self.url = found[1]

    def closes(self) -> None:
        """Wait until it accepts no more connections."""
        with contextlib.suppress(httpx.TransportError):
            while True:
                httpx.get(f"{self.url}/health")

    def ended(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, errors = self.popen.communicate(timeout=PATIENCE)
        return self.popen.returncode, errors


@contextlib.contextmanager
def process(folder: Path, *, grace: float = 60, how: str = "well") -> Iterator[Process]:
    it = Process(folder, grace, how)
    try:
        if how == "well":
            it.listening()
        yield it
    finally:
        it.popen.kill()
        it.popen.communicate()


@contextlib.contextmanager
def asked(server: Process, prompt: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that are not empty."""
    body = {"prompt": prompt, "stream": True}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=PATIENCE) as answer:
        yield (line for line in answer.iter_lines() if line)


def test_a_running_answer_is_finished(tmp_path):
    with process(tmp_path) as server, asked(server, "wait") as lines:
        assert any('"text":"H"' in line for line in lines)
        server.popen.send_signal(signal.SIGTERM)
        server.closes()
        (tmp_path / "go").touch()
        rest = list(lines)
        assert any('"text":"i"' in line for line in rest)
        assert rest[-1] == "data: [DONE]"
        code, errors = server.ended()
    assert code == 0, errors
    assert errors.count("POST /v1/completions 200") == 1
    assert " INFO tuned: threads 2\n" in errors
    assert "Traceback" not in errors


def test_grace_ends(tmp_path):
    with process(tmp_path, grace=0.2) as server, asked(server, "forever") as lines:
        assert any('i"' in line for line in lines)
        server.popen.send_signal(signal.SIGINT)
        rest = list(lines)
        assert '"code":"stopped"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        code, errors = server.ended()
    assert code == 0, errors
    assert "Traceback" not in errors


def test_a_second_signal_is_obeyed_at_once(tmp_path):
    with process(tmp_path) as server, asked(server, "forever") as lines:
        assert any('i"' in line for line in lines)
        server.popen.send_signal(signal.SIGINT)
        server.closes()
        server.popen.send_signal(signal.SIGINT)
        code, errors = server.ended()
    assert code == 0, errors
    assert "Traceback" not in errors


def test_an_idle_server_ends(tmp_path):
    with process(tmp_path) as server:
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        server.popen.send_signal(signal.SIGTERM)
        code, errors = server.ended()
    assert code == 0
    assert "GET /health 200" in errors


def test_no_site_reaches_what_only_this_machine_may(tmp_path):
    with process(tmp_path) as server:
        for host, status in (("evil.example.com", 403), ("127.example.org", 403), ("localhost", 200)):
            assert httpx.get(f"{server.url}/v1/models", headers={"host": host}).status_code == status


def test_a_model_that_cannot_be_loaded(tmp_path):
    with process(tmp_path, how="refused") as server:
        code, errors = server.ended()
    assert code == 2
    assert errors == "error: no such model\n  remedy:   take another\n"


def test_loading_can_be_interrupted(tmp_path):
    with process(tmp_path, how="never") as server:
        assert server.popen.stdout.readline() == "loading\n"
        server.popen.send_signal(signal.SIGTERM)
        code, errors = server.ended()
    assert code == 0, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("how", ["well", "broken"])
def test_a_bug_ends_it_with_its_traceback(tmp_path, how):
    with process(tmp_path, how=how) as server:
        if how == "well":
            answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "break"}, timeout=PATIENCE)
            assert answer.status_code == 503
        code, errors = server.ended()
    assert code == 1
    assert ("ZeroDivisionError" if how == "well" else "AssertionError") in errors


def refused(*arguments: object) -> str:
    """What mosaic-serve says when it refuses."""
    program = Path(sys.executable).with_name("mosaic-serve")
    command = [program, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_what_is_refused_before_anything_is_loaded(tmp_path):
    assert "neither OUT nor --demo" in refused()
    assert "--max-body" in refused(tmp_path, "--max-body", "much")
    assert "API key" in refused(tmp_path, "--api-key", "")
    (tmp_path / "keys").write_text("\n \n")
    assert "API key" in refused(tmp_path, "--api-key-file", tmp_path / "keys")
    assert "--api-key-file" in refused(tmp_path, "--api-key-file", tmp_path / "none")
    assert "--cors-origin" in refused(tmp_path, "--cors-origin", "chat.example.org")
    assert "--port" in refused(tmp_path, "--port", "70000")
    assert "no such --device" in refused(tmp_path, "--device", "tpu")
    assert "--gpu-layers means nothing" in refused(tmp_path, "--device", "cpu", "--gpu-layers", "1")


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1 port {port}" in refused(tmp_path, "--port", port)


def test_a_folder_that_is_no_model(tmp_path):
    assert "error: " in refused(tmp_path, "--port", "0")
