"""Experiments by name."""

from collections.abc import Mapping
from types import MappingProxyType

from evaluation.errors import UnknownExperimentError
from evaluation.experiments import measured, ours, paper
from evaluation.experiments.base import Experiment

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        "table2": paper.table2,
        "calibration": paper.calibration,
        "heterogeneity": paper.heterogeneity,
        "width": paper.width,
        "frontier": paper.frontier,
        "load": paper.load,
        "burst-train": paper.burst_train,
        "ablation": paper.ablation,
        "noise": paper.noise,
        "grid": ours.grid,
        "scarcity": ours.scarcity,
        "fairness": ours.fairness,
        "routers": ours.routers,
        "staleness": ours.staleness,
        "robustness": ours.robustness,
        "measured-table2": measured.table2,
        "measured-saturation": measured.saturation,
        "measured": measured.others,
        "measured-workloads": measured.workloads,
    }
)


def find_experiment(name: str) -> Experiment:
    """Return an experiment.

    Raises:
        UnknownExperimentError: There is none of that name.
    """
    experiment = EXPERIMENTS.get(name)
    if experiment is None:
        raise UnknownExperimentError(f"no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    return experiment
