import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_already_is_no_model_of_the_tests():
    """The seams look for models through all objects that there are: those of other tests take longer than all else."""
    gc.collect()
    gc.freeze()
