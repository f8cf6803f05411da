"""Runs Keras on its JAX backend, for tests that compare with it: `python keras_script.py JOB RESULT`, where JOB and RESULT are files.

Both are JSON. JOB has `networks`, what to train on which arrays (NumPy files) by name, and `scripted`, runs with given monitored values.
"""

import csv
import json
import os
import sys
import tempfile
import warnings

import numpy as np


def network(keras, job):
    arrays = np.load(job["arrays"])
    layers = {
        "mlp": [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(job["outputs"])],
        "cnn": [keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(job["outputs"])],
    }
    model = keras.Sequential([keras.Input(arrays["x"].shape[1:]), *layers[job["kind"]]])
    model.set_weights([arrays[f"w{index}"] for index in range(len(model.get_weights()))])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if job["loss"] == "sparse_categorical_crossentropy" else job["loss"]
    model.compile(keras.optimizers.SGD(job["rate"]), loss, metrics=job["metrics"])
    options = {"batch_size": job["batch_size"], "verbose": 0}
    valid = arrays["x"][:9], arrays["y"][:9]
    history = model.fit(arrays["x"], arrays["y"], epochs=job["epochs"], shuffle=False, validation_data=valid, **options)
    found = model.evaluate(arrays["x"], arrays["y"], return_dict=True, **options)
    return {"history": history.history, "evaluate": found, "outputs": model.predict(arrays["x"], **options).tolist()}


def scripted(keras, job):
    """Runs one epoch for each of the given values, which are in the logs as `score`."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    rates, values = [], iter(job["values"])

    class Script(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

        def on_epoch_end(self, epoch, logs=None):
            logs.clear()
            logs["score"] = next(values)

    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "log.csv")
        callbacks = {
            "early": lambda: keras.callbacks.EarlyStopping("score", **job["options"]),
            "plateau": lambda: keras.callbacks.ReduceLROnPlateau("score", **job["options"]),
            "csv": lambda: keras.callbacks.CSVLogger(path),
        }
        callback = callbacks[job["callback"]]()
        model.fit(np.zeros((1, 1)), np.zeros((1, 1)), epochs=len(job["values"]), callbacks=[Script(), callback], verbose=0)
        rows = []
        if job["callback"] == "csv":
            with open(path, newline="") as file:
                rows = list(csv.DictReader(file))
    return {"epochs": len(rates), "rates": rates, "rows": rows}


def main(job, result):
    os.environ["KERAS_BACKEND"] = "jax"
    warnings.simplefilter("ignore")
    import keras  # Here, because doctests import this module even if Keras is not installed.

    with open(job) as file:
        jobs = json.load(file)
    networks = {name: network(keras, one) for name, one in jobs["networks"].items()}
    found = {"networks": networks, "scripted": [scripted(keras, one) for one in jobs["scripted"]]}
    with open(result, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
