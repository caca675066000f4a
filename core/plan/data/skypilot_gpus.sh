export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1) MASTER_PORT=29500
here=%{node_chips}
export WORLD_SIZE=$((SKYPILOT_NUM_NODES * here))
for ((n = 0; n < here; n++)); do
  RANK=$((SKYPILOT_NODE_RANK * here + n)) LOCAL_RANK=$n %{command} &
  processes+=($!)
done
code=0
for process in "${processes[@]}"; do
  wait $process || code=$?
done
exit $code
