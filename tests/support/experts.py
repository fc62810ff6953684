"""Experts that are handed to operations."""

import random


class Arriving:
    """Experts that come in groups of so many, shuffled by a seed; None: all at once."""

    def __init__(self, experts, size=None, seed=0):
        self.experts, self.size, self.seed, self.asked = experts, size, seed, []

    def observe(self, chosen, elsewhere=()):
        self.chosen = chosen

    def arriving(self, numbers, tokens):
        self.asked += numbers
        order = list(dict.fromkeys(numbers))
        random.Random(self.seed).shuffle(order)
        for first in range(0, len(order), self.size or len(order)):
            yield {number: self.experts[number] for number in order[first : first + (self.size or len(order))]}
