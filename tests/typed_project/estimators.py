"""scikit-learn's estimators. scikit-learn has no types, so what they inherit from it is `Any`."""

from typing import assert_type

import numpy as np
from network import Network, make_data

from fitflax.sklearn import LinenClassifier, LinenRegressor


def classify() -> None:
    x, y = make_data()
    classifier = assert_type(LinenClassifier(Network(), epochs=2, random_state=0).fit(x, y), LinenClassifier)
    assert_type(classifier.predict(x), np.ndarray)
    assert_type(classifier.predict_proba(x), np.ndarray)
    assert_type(classifier.history_, dict[str, list[float]])
    assert_type(classifier.n_iter_, int)


def regress() -> None:
    x, y = make_data()
    regressor = assert_type(LinenRegressor(optimizer="adam", learning_rate=1e-2, epochs=2).fit(x, y.astype(float)), LinenRegressor)
    assert_type(regressor.predict(x), np.ndarray)
