"""Random models and their judge, for `tests/test_random_models.py` and `tools/stress.py`."""
