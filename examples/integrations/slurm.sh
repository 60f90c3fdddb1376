#!/bin/bash
# Runs on two nodes of eight GPUs: one Slurm task per node starts torchrun, which starts one process per GPU.
#   sbatch examples/integrations/slurm.sh
#SBATCH --job-name=autopar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
set -euo pipefail

script="${1:-examples/integrations/torchrun_script.py}"
processes="${PROCESSES_PER_NODE:-8}"
nodes="${SLURM_NNODES:-1}"
first=$(scontrol show hostnames "${SLURM_JOB_NODELIST}" | head -n 1)

# Planning takes one process and no GPU. Plan once, before the job holds its GPUs, and load the file in the script:
#   autopar plan mypackage.train:model_and_inputs --mesh 2x8 --cluster dgx-h100 --output plan.json
srun torchrun \
  --nnodes "${nodes}" --nproc-per-node "${processes}" \
  --rdzv-id "${SLURM_JOB_ID}" --rdzv-backend c10d --rdzv-endpoint "${first}:29500" \
  "${script}"
