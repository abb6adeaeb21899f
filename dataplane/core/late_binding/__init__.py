"""Late binding: requests wait here, not in an engine, until they can start and be decoded."""

from dataplane.core.late_binding.scheduler import LateBinding
from dataplane.core.late_binding.settings import Fairness, LateBindingSettings

__all__ = ["Fairness", "LateBinding", "LateBindingSettings"]
