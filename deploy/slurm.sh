#!/bin/bash
#SBATCH --job-name=draftsmith
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=64
#SBATCH --mem=512G
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --output=%x-%j.log
# One recipe on one node: everything up to the states by the engine, training on eight GPUs, then export to report.
# Killed at its time limit or preempted, the job is requeued and goes on where it was. RECIPE is taken from the
# environment: sbatch --export=ALL,RECIPE=huge.yaml,TARGET=/models/huge deploy/slurm.sh
set -euo pipefail
: "${RECIPE:?give RECIPE=file.yaml}" "${TARGET:?give TARGET=folder or hub id}"
trap 'kill -TERM "$child" 2>/dev/null; wait "$child"; scontrol requeue "$SLURM_JOB_ID"; exit 0' TERM

run() {
    "$@" &
    child=$!
    wait "$child"
}

run draftsmith check "$TARGET" --before-training
run draftsmith run "$RECIPE" --until extract
run torchrun --nproc-per-node 8 -m draftsmith.cli.main train "$RECIPE"
run draftsmith run "$RECIPE"
