"""What a run would be: who runs where, what it needs and what stands in its way. Needs no torch, no Ray and no GPU."""

from pipelines.plan.plan import preflight as preflight
from pipelines.plan.plan import problems as problems
from pipelines.plan.render import show as show
