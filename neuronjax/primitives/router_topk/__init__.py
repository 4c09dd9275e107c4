"""The router: public functions, the macro, and the rules of its calls."""

from neuronjax.primitives.router_topk.balance import expert_counts as expert_counts
from neuronjax.primitives.router_topk.balance import (
    load_balance_loss as load_balance_loss,
)
from neuronjax.primitives.router_topk.functions import router_topk as router_topk
