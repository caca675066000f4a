#!/bin/bash
# %{about}; submit with: sbatch [--partition=…] [--account=…] %{name}.sbatch
#SBATCH --job-name=%{name}
#SBATCH --nodes=%{nodes}
#SBATCH --ntasks-per-node=%{node_chips}
%{gres}#SBATCH --time=%{time}
#SBATCH --signal=B:USR1@%{lead}
#SBATCH --open-mode=append
#SBATCH --output=%{name}-%%j.log
#SBATCH --requeue
: ${SABIA_RESTARTS:=%{restarts}}
lead=%{lead}
set -- %{words}
