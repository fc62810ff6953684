"""Thousands of requests of every kind to one mosaic-serve, and how its memory goes: `just soak`.

Fails if memory still grows after the first third, if the server answers anything but what was to be expected, or if it
does not end well when told to.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import httpx

from mosaic.recipes import demo_model

COMPANY = 12  # requests at a time; more than there are places, so that some wait
SAMPLES = 60
TOLERANCE = 8 << 20  # bytes: the heap of a process that does the same again and again is not quite still
WORDS = ["and", "the king said", "unto her", "sister", "of Bath,", "你好", "🙂", "e\u0301", "a truth universally"]


class Soak:
    """The requests. `answers`: how many of each kind came to which end."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client = client
        self._random = random.Random(seed)
        self.answers: Counter[str] = Counter()
        self._talks: list[list[dict[str, str]]] = [[] for _ in range(4)]

    async def one(self) -> None:
        kind = self._random.choice([self.completion, self.chat, self.streamed, self.aborted, self.refused, self.scored])
        self.answers[f"{kind.__name__}: {await kind()}"] += 1

    async def completion(self) -> str:
        body = {"prompt": self._text(30), "max_tokens": self._random.randint(1, 24), "seed": 1}
        return await self._usage(await self._client.post("/v1/completions", json=body))

    async def chat(self) -> str:
        """Turn after turn of some conversations, begun anew when they grow long."""
        talk = self._random.choice(self._talks)
        if len(talk) > 8:
            talk.clear()
        messages = [*talk, {"role": "user", "content": self._text(12)}]
        response = await self._client.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 16, "logprobs": True, "top_logprobs": 2}
        )
        if response.status_code == 200:
            talk[:] = [*messages, {"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]}]
        return await self._usage(response)

    async def streamed(self) -> str:
        chunks = [chunk async for chunk in self._chunks(self._random.randint(1, 30))]
        return "ok" if chunks[-1] == "[DONE]" and json.loads(chunks[-2])["choices"][0]["finish_reason"] else "cut off"

    async def aborted(self) -> str:
        """Leaves after the first words."""
        async for _ in self._chunks(400):
            return "left"
        return "nothing came"

    async def refused(self) -> str:
        body = self._random.choice([b"{", b'{"prompt": 3}', b'{"prompt": "x", "temperature": -1}', b"[" * 10_000])
        response = await self._client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        return str(response.status_code) if "error" in response.json() else "no error in the answer"

    async def scored(self) -> str:
        body = {"prompt": self._text(20), "max_tokens": 0, "echo": True, "logprobs": 1}
        response = await self._client.post("/v1/completions", json=body)
        found = response.json()["choices"][0]["logprobs"]["token_logprobs"]
        return "ok" if found[0] is None and all(value <= 0 for value in found[1:]) else "no scores"

    async def _chunks(self, max_tokens: int):
        body = {"messages": [{"role": "user", "content": self._text(12)}], "max_tokens": max_tokens, "stream": True}
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")

    async def _usage(self, response: httpx.Response) -> str:
        return "ok" if response.status_code == 200 and response.json()["usage"]["prompt_tokens"] else response.text

    def _text(self, most: int) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.randint(1, most)))


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10


async def soak(address: str, pid: int, requests: int, seed: int) -> tuple[list[int], Counter[str]]:
    """Memory at SAMPLES moments, and what became of the requests."""
    limits = httpx.Limits(max_connections=2 * COMPANY)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
        work, samples = Soak(client, seed), []
        for sample in range(SAMPLES):
            left = requests * (sample + 1) // SAMPLES - requests * sample // SAMPLES
            while left > 0:
                await asyncio.gather(*(work.one() for _ in range(min(COMPANY, left))))
                left -= COMPANY
            samples.append(resident(pid))
            print(f"{(sample + 1) * 100 // SAMPLES:3d} %  {samples[-1] / 1e6:8.1f} MB", file=sys.stderr)
        health = (await client.get("/health")).status_code
        assert health == 200, f"/health: {health}"
    return samples, work.answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    program = Path(sys.executable).with_name("mosaic-serve")
    command = [program, demo_model(), "--port", "0", "--parallel", "4", "--context", "1024", "--max-queue", "64"]
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = re.search(r"http://\S+", server.stdout.readline())[0]
        samples, answers = asyncio.run(soak(address, server.pid, arguments.requests, arguments.seed))
    finally:
        server.send_signal(signal.SIGTERM)
        ended = server.wait(60)
    for name, count in sorted(answers.items()):
        print(f"{count:6d}  {name}")
    third = len(samples) // 3
    middle, last = median(samples[third : 2 * third]), median(samples[2 * third :])
    print(f"memory: {samples[0] / 1e6:.1f} MB at first; medians of the middle and last third "
          f"{middle / 1e6:.1f} and {last / 1e6:.1f} MB; exit code {ended}")  # fmt: skip
    good = {"ok", "left", "400"}
    wrong = [name for name in answers if name.split(": ", 1)[1] not in good]
    return int(bool(wrong) or last > middle + TOLERANCE or ended != 0)


if __name__ == "__main__":
    sys.exit(main())
