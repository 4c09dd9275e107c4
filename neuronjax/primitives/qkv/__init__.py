"""QKV: public functions, the macro, and the rules of its calls."""

from neuronjax.primitives.qkv.functions import qkv as qkv
from neuronjax.primitives.qkv.functions import qkv_cte as qkv_cte
from neuronjax.primitives.qkv.functions import qkv_tkg as qkv_tkg
