"""The recognition of digits from a few examples of each: the lessons, and the learners that the demo compares."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention import latent_attention
from ...intention import intention
from ...intention.variants import kernel_features
from ...intention.variants.models import most_likely

CLASSES, SHOTS, WIDTH = 10, 5, 64
TRIALS, LESSONS = 20, 100
"""Numbers of draws of examples. Trials choose each learner's setting, and lessons compare the learners."""


@functools.cache
def images() -> tuple[Tensor, Tensor]:
    """Return the 1,797 images of digits from scikit-learn, (N, 64) from 0 to 1, and their classes (N,)."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    return torch.from_numpy(pixels).float() / 16, torch.from_numpy(classes)


class Lessons(NamedTuple):
    """Random draws of examples and of images to recognise, as indices into `images`."""

    support: Tensor
    """The examples, (draws, 50): 5 of each class, class by class."""
    query: Tensor
    """The images to recognise, (draws, M): all others of the same half of the images."""

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the examples (draws, 50, 64), their classes (draws, 50), and images to recognise (draws, M, 64)."""
        pixels, classes = images()
        return pixels[self.support], classes[self.support], pixels[self.query]


def draw(count: int, half: int) -> Lessons:
    """Return `count` draws from one of two disjoint halves of the images (`half` 0 or 1). All calls return the same."""
    classes = images()[1]
    ours = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0)).chunk(2)[half]
    random = torch.Generator().manual_seed(half + 1)
    supports, queries = [], []
    for _ in range(count):
        order = ours[torch.randperm(len(ours), generator=random)]
        support = torch.cat([order[classes[order] == one][:SHOTS] for one in range(CLASSES)])
        supports.append(support)
        queries.append(order[~torch.isin(order, support)])
    return Lessons(torch.stack(supports), torch.stack(queries))


# ---- learners: (examples, classes, queries, setting) -> classes of the queries ---------------------------------------

Predict = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""A learner's function: examples (draws, 50, 64), their classes, images (draws, M, 64) and a setting -> classes (draws,
M)."""


def by_intention(support: Tensor, classes: Tensor, query: Tensor, alpha: float) -> Tensor:
    """Classify by regression, as in a least-squares SVM.

    Each class has a column of targets: +1 for its examples and -1 for others.
    """
    labels = 2 * F.one_hot(classes, CLASSES).to(support.dtype) - 1
    return most_likely(intention(query[:, None], support[:, None], labels[:, None], alpha)[:, 0])


def by_kernel_intention(support: Tensor, classes: Tensor, query: Tensor, setting: tuple[float, float]) -> Tensor:
    """Classify by the regression of `by_intention`, on features whose inner products are a Gaussian kernel.

    `setting` is (gamma, alpha).
    """
    gamma, alpha = setting
    own, others = (kernel_features(rows[:, None], support[:, None], gamma)[:, 0] for rows in (support, query))
    return by_intention(own, classes, others, alpha)


def by_attention(support: Tensor, classes: Tensor, query: Tensor, temperature: float) -> Tensor:
    """Classify by attention: weight the classes of the examples by softmax(cosine / temperature)."""
    labels = F.one_hot(classes, CLASSES).to(support.dtype)
    query, support = (F.normalize(rows, dim=-1)[:, None] for rows in (query, support))
    return most_likely(latent_attention(query, support, labels[:, None], scale=1 / temperature)[:, 0])


def by_scikit_learn(make: Callable[[Any], Any]) -> Predict:
    """Return the function of a learner that fits scikit-learn's estimator `make(setting)` to each draw."""

    def predict(support: Tensor, classes: Tensor, query: Tensor, setting: Any) -> Tensor:
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1):  # the matrices are too small for several threads
            lessons = zip(support.numpy(), classes.numpy(), query.numpy(), strict=True)
            return torch.stack([torch.from_numpy(make(setting).fit(x, y).predict(q)) for x, y, q in lessons])

    return predict


def _ridge(alpha: float) -> Any:
    from sklearn.linear_model import RidgeClassifier

    return RidgeClassifier(alpha=alpha)


def _discriminant(shrinkage: float) -> Any:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    return LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage)


def _neighbours(count: int) -> Any:
    from sklearn.neighbors import KNeighborsClassifier

    return KNeighborsClassifier(count)


def _support_vectors(setting: tuple[float, float]) -> Any:
    from sklearn.svm import SVC

    gamma, penalty = setting
    return SVC(gamma=gamma, C=penalty)


class Learner(NamedTuple):
    """A method of learning, and the settings to choose from."""

    predict: Predict
    settings: list[Any]
    told: str
    """A format string that shows a setting to readers."""


PENALTIES = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
GAMMAS = (0.05, 0.1, 0.2, 0.4)

KERNEL, LINEAR, ATTENTION = "Intention, kernel features", "Intention", "attention, cosine"
LEARNERS: dict[str, Learner] = {
    LINEAR: Learner(by_intention, PENALTIES, "alpha {}"),
    KERNEL: Learner(
        by_kernel_intention, [(gamma, alpha) for gamma in GAMMAS for alpha in (0.01, 0.1, 1.0)], "gamma {}, alpha {}"
    ),
    ATTENTION: Learner(by_attention, [0.01, 0.02, 0.03, 0.05, 0.1, 0.2], "temperature {}"),
    "scikit-learn, RidgeClassifier": Learner(by_scikit_learn(_ridge), PENALTIES, "alpha {}"),
    "scikit-learn, LDA": Learner(by_scikit_learn(_discriminant), [0.1, 0.3, 0.5, 0.7, 0.9], "shrinkage {}"),
    "scikit-learn, nearest neighbours": Learner(by_scikit_learn(_neighbours), [1, 3, 5], "{} of them"),
    "scikit-learn, SVC": Learner(
        by_scikit_learn(_support_vectors),
        [(gamma, penalty) for gamma in GAMMAS for penalty in (1.0, 10.0, 100.0)],
        "gamma {}, C {}",
    ),
}


class Outcome(NamedTuple):
    """The result of a learner in the lessons."""

    name: str
    told: str
    """The chosen setting, in words."""
    accuracy: float
    """Share of correctly recognised images, as the mean over the lessons."""
    error: float
    """Standard error of that mean."""
    predicted: Tensor
    """The predicted classes, (draws, M)."""


def outcome(name: str, learner: Learner, trials: Lessons, lessons: Lessons, done: Callable[[], Any]) -> Outcome:
    """Choose the setting with the best accuracy in the trials, and use it in the lessons.

    The function calls `done` after each setting.
    """
    best = max(learner.settings, key=dict(_tried(learner, trials, done)).__getitem__)
    predicted = learner.predict(*lessons.parts(), best)
    right = _share_right(predicted, lessons)
    done()
    told = learner.told.format(*best) if isinstance(best, tuple) else learner.told.format(best)
    return Outcome(name, told, float(right.mean()), float(right.std() / len(right) ** 0.5), predicted)


def _tried(learner: Learner, trials: Lessons, done: Callable[[], Any]) -> Iterator[tuple[Any, float]]:
    """Yield each setting and its accuracy in the trials."""
    for setting in learner.settings:
        yield setting, float(_share_right(learner.predict(*trials.parts(), setting), trials).mean())
        done()


def _share_right(predicted: Tensor, lessons: Lessons) -> Tensor:
    """Return the share of correctly recognised images in each draw: (draws,)."""
    return (predicted == images()[1][lessons.query]).double().mean(-1)
