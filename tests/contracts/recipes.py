"""The recipes of the strategy usage guide, as it prints them."""

RECIPES = {
    "high throughput": """
    # Using DeepSpeed ZeRO-2 with large tensor parallelism
    python train.py \\
        --zero_stage 2 \\
        --engine_tp_size 4 \\
        --engine_mem_util 0.9 \\
        --enable_engine_sleep \\
        --micro_train_batch_size 1 \\
        --train_batch_size 128
""",
    "memory efficient": """
    # Using FSDP with CPU offloading for maximum memory efficiency
    python train.py \\
        --fsdp \\
        --fsdp_cpu_offload \\
        --use_mp_opt \\
        --engine_tp_size 2 \\
        --engine_mem_util 0.85 \\
        --enable_engine_sleep \\
        --micro_train_batch_size 1 \\
        --train_batch_size 64
""",
    "vision language": """
    # Training VLMs with multimodal data
    python train_vl.py \\
        --fsdp \\
        --engine_tp_size 4 \\
        --mixed_mm_data \\
        --packing_samples \\
        --enable_engine_sleep \\
        --plot_every 20
""",
}
