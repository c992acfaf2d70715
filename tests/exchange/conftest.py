import pytest

from tests.exchange.scripted import World


@pytest.fixture
async def world() -> World:
    return World()
