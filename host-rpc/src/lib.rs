//! Request and response between CPUs, over the EFA message channel or mlx5.
