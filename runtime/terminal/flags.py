"""The options of mosaic-run that no other program has: what they are called and what they say."""

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[str | None, typer.Argument(metavar="OUT", help="Model directory; left out with --demo.")]
Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help="What to say; - reads standard input.")]
File = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="Take the prompt from a file; PROMPT follows it.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told before all else.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue plain text, without chat template.")]
Think = Annotated[
    bool | None, typer.Option("--think/--no-think", help="Whether to think before answering; default: the model's.")
]
ShowThinking = Annotated[
    bool | None,
    typer.Option("--show-thinking/--hide-thinking", help="Whether reasoning is shown; default: on a terminal."),
]
SessionFile = Annotated[
    Path | None,
    typer.Option("--session", metavar="FILE", help="Go on with the conversation in FILE, and keep it there."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer and its figures as one JSON object.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens of an answer; default: no limit.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="STRING", help="End an answer before this text; may be repeated.")
]
Temperature = Annotated[float | None, typer.Option(help="0: always the likeliest token.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest, up to this share.")]
TopK = Annotated[int | None, typer.Option(help="Sample from so many tokens; 0: from all.")]
MinP = Annotated[
    float | None, typer.Option(help="Only from tokens with at least this part of the likeliest one's probability.")
]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: less of what prompt and answer have already.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Above 0: less of what the answer has already.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same, for each time it is there.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="TOKEN=BIAS", help="Add to a token's logit; -inf: never that one; may be repeated."),
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text; not with a GPU.")]
Profiled = Annotated[bool, typer.Option("--profile", help="Show where the time went, by operation; on the CPU alone.")]
Stats = Annotated[
    str | None,
    typer.Option(metavar="FORM", help="Figures on standard error: text, json (one object, last line), or live."),
]
Plan = Annotated[bool, typer.Option("--plan", help="Only tell where the memory goes and what to expect.")]
Tune = Annotated[
    bool, typer.Option("--tune", help="Only find the settings that are fastest here, in a minute, and keep them.")
]
