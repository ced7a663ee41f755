"""End-to-end training of Mixture-of-Experts language models."""
