"""Searches the hyperparameters of a linen module with scikit-learn's `GridSearchCV` over a scaler and `LinenClassifier`, and pickles the search.

python examples/grid_search.py [--directory runs/grid_search] [--epochs 30]
"""

import argparse
import pathlib
import pickle

from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fitflax.sklearn import LinenClassifier


class MLP(nn.Module):
    """Two hidden layers with dropout, for rows `[batch, features]`."""

    classes: int
    features: int = 64
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, *, train: bool):
        for _ in range(2):
            x = nn.relu(nn.Dense(self.features)(x))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.classes)(x)


def main(directory: str | pathlib.Path = "runs/grid_search", epochs: int = 30, seed: int = 0, verbose: int = 2) -> float:
    """Searches, and returns the test accuracy of the best model."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, stratify=y, random_state=seed)
    classifier = LinenClassifier(MLP(classes=10), learning_rate=3e-3, epochs=epochs, early_stopping=True, random_state=seed)
    # The search can vary the module's fields, like any other hyperparameters.
    grid = {"linenclassifier__module__features": [32, 128], "linenclassifier__module__dropout": [0.0, 0.3]}
    search = GridSearchCV(make_pipeline(StandardScaler(), classifier), grid, cv=3, verbose=verbose).fit(x_train, y_train)
    accuracy = search.score(x_test, y_test)

    path = pathlib.Path(directory) / "search.pickle"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(search))
    if verbose:
        for params, mean in zip(search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True):
            print(f"{mean:.3f}  " + ", ".join(f"{name.rpartition('__')[2]} {value}" for name, value in params.items()))
        print(f"best model: {path}")
        print(f"test accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--directory")
    parser.add_argument("--epochs", type=int)
    main(**vars(parser.parse_args()))
