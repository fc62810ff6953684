"""From a checkpoint to a model directory: plan from headers, quantise slice by slice, prove the result. No torch."""
