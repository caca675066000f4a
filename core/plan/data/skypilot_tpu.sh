export TPU_WORKER_HOSTNAMES=$(echo "$SKYPILOT_NODE_IPS" | paste -sd,)
export TPU_WORKER_ID=$SKYPILOT_NODE_RANK
%{command}
