"""Between messages and tokens: prompts by the model's template, and replies taken apart while they grow."""
