"""Models: loaded or made with random weights, quantized, given adapters; the judges' encoder; weights in shards."""
