"""Questions as learners ask them, with the concept that must come first.

The twenty were written before the ranking of distlab.tutor existed. They are asked as
they stand: a concept's own list of questions must not repeat one (a test holds that).
"""

FIVE = {
    "What is the RANK variable?": "environment-variables",
    "Why does my all-reduce hang?": "hang",
    "When should I use DDP and not one process?": "ddp-or-one-process",
    "Why is my loss different on each rank?": "loss-per-rank",
    "Does it pay on a laptop?": "laptop-speed",
}
TWENTY = {
    "How do I give each GPU to a different process?": "local-rank",
    "What does torchrun do?": "launcher",
    "Should I sum or average the gradients?": "gradient-averaging",
    "Why do all ranks see the same samples in every epoch?": "set-epoch",
    "What is the difference between gloo and nccl?": "backend",
    "How does a ring all-reduce work?": "ring-all-reduce",
    "Do I have to multiply the learning rate by the number of workers?": (
        "learning-rate-scaling"
    ),
    "My model does not fit on one GPU, what can I do?": "model-parallelism",
    "What is the difference between ZeRO and FSDP?": "fsdp",
    "How do I save a checkpoint without corrupting it when the job is killed?": (
        "checkpoint"
    ),
    "How can I hide the communication behind backward?": "overlap",
    "Why is one slow GPU slowing down the whole job?": "straggler",
    "What happens when a worker dies during training?": "rank-failure",
    "How do I compute validation accuracy across ranks?": "distributed-evaluation",
    "How do I train with a bigger batch than fits in memory?": "gradient-accumulation",
    "Why do my fp16 gradients become zero?": "loss-scaling",
    "Is asynchronous SGD faster?": "staleness",
    "Why are the results not bit for bit the same with another number of GPUs?": (
        "floating-point-sums"
    ),
    "Can I send fewer bytes for the gradients?": "gradient-compression",
    "How long does it take to send a message?": "latency-and-bandwidth",
}
SIZING = {
    "will a 7B model fit on 8 GPUs": "will-it-fit",
    "Does llama 70B fit on 64 H100s?": "will-it-fit",
    "how much memory does a 405b model need": "will-it-fit",
    "how long does it take to train 70B on 1024 GPUs": "training-time",
    "How much does a training run cost?": "training-time",
    "which layout should I use for 70B on 256 GPUs": "choosing-a-layout",
}
