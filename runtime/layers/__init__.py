"""The mechanisms a decoder is built of. No model names here: everything comes from a ModelSpec."""
