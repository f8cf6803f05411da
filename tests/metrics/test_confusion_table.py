"""`ConfusionTable`: as text and as HTML."""

import numpy as np
import pytest

from fitflax.errors import MetricError
from fitflax.metrics import ConfusionTable


def test_rows_and_columns_have_the_names_of_their_classes():
    table = ConfusionTable(np.float32([[3, 1], [0, 0]]), labels=["<cat>", "dog"])
    page = table._repr_html_()
    assert repr(table).splitlines()[1].split() == ["<cat>", "3", "1"]
    assert page.count("&lt;cat&gt;") == 2 and "0.75)" in page and page.count("0.00)") == 2
    assert repr(ConfusionTable(np.eye(2) / 3)).splitlines()[0].split() == ["target", "/", "prediction", "0", "1"]
    assert "nan" in repr(ConfusionTable([[np.nan]]))


@pytest.mark.parametrize(("matrix", "labels", "words"), [([1, 2], None, "shape"), ([[1, 2]], None, "shape"), ([[1]], ["a", "b"], "2 names")])
def test_an_invalid_matrix_or_number_of_labels_is_an_error(matrix, labels, words):
    with pytest.raises(MetricError, match=words):
        ConfusionTable(matrix, labels)
