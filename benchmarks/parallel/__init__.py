"""Layers and experts over ranks beside plain sharding, and beside transformers' plans and DeepSpeed's AutoTP."""
