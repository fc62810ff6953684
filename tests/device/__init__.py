"""What a person runs on a machine with an NVIDIA card (check.sh): whether Mosaic is right there, and how fast."""
