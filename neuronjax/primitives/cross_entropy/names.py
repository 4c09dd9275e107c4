"""What the loss family is called."""

FORWARD, BACKWARD = "CrossEntropyFwd", "CrossEntropyBwd"
LINEAR, LINEAR_BACKWARD = "LinearCrossEntropy", "LinearCrossEntropyBwd"

# By the vendor's names, the emitters, and the functions of models.
PEERS = ("cross_entropy_forward", "cross_entropy_backward")
KERNELS = ("cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel")
LOSS, LINEAR_LOSS = "cross_entropy", "linear_cross_entropy"
LINEAR_KERNEL = "linear_cross_entropy_kernel"
PUBLIC = (LOSS, LINEAR_LOSS)
BACKWARDS = (PEERS[1], KERNELS[1])
ON_LOGITS = (*PEERS, *KERNELS, LOSS)
ON_FACTORS = (LINEAR_LOSS, LINEAR_KERNEL)
ALL = (*ON_LOGITS, *ON_FACTORS)

REDUCTIONS = ("none", "mean", "sum")
BACKWARD_REDUCTIONS = ("mean", "sum")
