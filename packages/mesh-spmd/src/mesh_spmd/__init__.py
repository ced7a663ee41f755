"""Process meshes, placements and sharding geometry for SPMD training."""
