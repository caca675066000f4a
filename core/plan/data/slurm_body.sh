sabia=(sabia)
if [ -n "${SABIA_ENV:-}" ]; then
  place=${SLURM_TMPDIR:-/tmp}/sabia-environment-$SLURM_JOB_ID
  everywhere=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1)
  sbcast --force "$SABIA_ENV" "$place.tar" || exit
  "${everywhere[@]}" bash -c 'mkdir -p "$0" && tar -xf "$0.tar" -C "$0" && rm "$0.tar"' \
    "$place" || exit
  sabia=("$place/bin/python" -m sabia.cli.main)
fi
launcher=()
# one that ends first leaves the others ten minutes to save
[ "${SLURM_NTASKS:-1}" -eq 1 ] || launcher=(srun --kill-on-bad-exit=0 --wait=600)
limit=$((${SLURM_JOB_END_TIME:-0} - ${SLURM_JOB_START_TIME:-0}))
if [ "$limit" -gt 0 ] && [ "$limit" -le "$lead" ]; then
  echo "warning: the time limit is $limit s, and sabia is stopped $lead s before it (--signal)," \
    "so before its first step; give a longer --time" >&2
fi
trap '' USR1 # the child inherits it: a signal before its own handler is installed is ignored
"${launcher[@]}" "${sabia[@]}" "$@" &
child=$!
told=no
trap 'told=again; kill -USR1 $child' USR1
trap 'told=stop; kill -TERM $child' TERM
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # the wait was cut short by a signal
  wait "$child"
  code=$?
done
trap : USR1 TERM
[ -z "${SABIA_ENV:-}" ] || "${everywhere[@]}" rm -rf "$place"
case $told-$code in # 137: srun's own code when a process was killed, such as for its memory
  again-75) requeue=yes ;;
  no-75 | no-137) [ "${SLURM_RESTART_COUNT:-0}" -lt "${SABIA_RESTARTS:-3}" ] && requeue=yes ;;
esac
if [ "${requeue:-no}" = yes ]; then
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60 # the requeue ends this script
fi
exit "$code"
