"""Makes and measures models of the 35B's true shape; the weights are random, the bytes are as many as the real ones."""
