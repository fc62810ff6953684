"""mosaic-run: what a person types and reads. Nothing here computes; nothing else prints answers."""
