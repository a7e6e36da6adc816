"""From arrays to a reader of streams: which of nine speakers says a vowel, told after each frame of the sound.

Each recording of JapaneseVowels is an array of frames with 12 columns. A continual Nyströmformer learns from 270
recordings, and is compared on 370 others with a logistic regression on all numbers of the window, and with the most
frequent speaker. Then the reader is saved, and a server reads frames one by one, stops, and goes on.
"""

import tempfile

import numpy as np
from cmab_models import StreamReader, fit_streams
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sktime.datasets import load_japanese_vowels

WINDOW = 16


def recordings(part: str) -> tuple[list[np.ndarray], list[int]]:
    """Return recordings (T, 12) of at least a window, and their speakers."""
    table, speakers = load_japanese_vowels(split=part, return_X_y=True, return_type="nested_univ")
    arrays = [np.stack([channel.to_numpy() for channel in row], 1) for row in table.to_numpy()]
    long = [number for number, array in enumerate(arrays) if len(array) >= WINDOW]
    return [arrays[number] for number in long], [int(speakers[number]) for number in long]


def windows(recording: np.ndarray) -> np.ndarray:
    """Return the numbers of all windows of a recording, as rows."""
    return np.stack([recording[end - WINDOW : end].ravel() for end in range(WINDOW, len(recording) + 1)])


def accuracy(predicted: list[np.ndarray], speakers: list[int]) -> float:
    """Return the share of windows for which the speaker was found."""
    return float(np.concatenate([each == speaker for each, speaker in zip(predicted, speakers, strict=True)]).mean())


def serve(folder: str, recording: np.ndarray) -> None:
    """Read the frames of a recording one by one, with a restart in between."""
    server = StreamReader.load(folder)
    for number, frame in enumerate(recording, 1):
        probabilities = server.step(frame)
        if probabilities is not None:
            best = probabilities.argmax()
            print(f"  frame {number:2}: speaker {server.classes[best]}, probability {probabilities[best]:.2f}")
        if number == WINDOW // 2:
            server.save(folder)  # with the state of the stream
            server = StreamReader.load(folder)
    assert probabilities is not None and np.allclose(probabilities, server.predict(recording)[-1], atol=1e-5)
    print("  the same after a restart as for the whole recording")


def main() -> None:
    (train, train_speakers), (test, test_speakers) = recordings("train"), recordings("test")
    reader = fit_streams(train, train_speakers, WINDOW, steps=300)
    found = [np.array(reader.classes)[reader.predict(recording).argmax(1)] for recording in test]
    print(f"reader of streams    accuracy {accuracy(found, test_speakers):.3f}")

    regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    rows = [windows(recording) for recording in train]
    regression.fit(np.concatenate(rows), np.repeat(train_speakers, [len(each) for each in rows]))
    found = [regression.predict(windows(recording)) for recording in test]
    print(f"logistic regression  accuracy {accuracy(found, test_speakers):.3f}")
    often = np.bincount(train_speakers).argmax()
    print(f"most frequent        accuracy {accuracy([np.full(len(each), often) for each in found], test_speakers):.3f}")

    with tempfile.TemporaryDirectory() as folder:
        reader.save(folder)
        serve(folder, test[0])


if __name__ == "__main__":
    main()
