"""Further training of an EAGLE-3 head on one GPU: how `smollm2-eagle3` was made. See `__main__.py` for the commands."""
