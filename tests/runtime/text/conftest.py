"""A tokenizer whose tokens are bytes, so that a reply can be divided anywhere."""

import pytest

from mosaic.runtime.tokenizer import Tokenizer
from support.tiny import write_tokenizer


@pytest.fixture(scope="session")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytewise")
    write_tokenizer(folder, 512)
    return Tokenizer(folder)
