"""Further options of `sabia plan-cluster`, which core/options/plan_cluster.py composes."""
