"""How prompts are cut: a token's bits depend on its position and what is before it, never on who asked."""

PREFILL_CHUNK = 1024  # tokens computed together; chunks begin at its multiples
