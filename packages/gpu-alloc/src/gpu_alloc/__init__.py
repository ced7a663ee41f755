"""A two-pool auto-growth best-fit GPU allocator with statistics and replay."""
