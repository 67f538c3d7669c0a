"""The tests of machines run with every form of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import forms


# Of the module, not of the test: hypothesis runs a test many times.
@pytest.fixture(scope="module", params=forms.FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """The form that `forms.new` makes now."""
    forms.of_turn = request.param
    yield request.param
    forms.of_turn = forms.FORMS[0]
