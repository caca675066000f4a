#!/bin/bash
# %{about}; inputs and outputs must be on storage that all hosts share
# give further options (--project, --zone, --storage=NAME, --priority) to the script
xpk workload create \
  --cluster="${XPK_CLUSTER:?name of the cluster}" \
  --workload=%{name} \
  --tpu-type=%{chips} \
  --num-slices=1 \
  --no-use-parallel-containers \
  --docker-image="${XPK_IMAGE:?docker image that has sabia}" \
%{spot}  --max-restarts=%{restarts} \
  --restart-on-exit-codes=%{interrupted} \
  --termination-grace-period-seconds=%{lead} \
  --command=%{command} \
  "$@"
