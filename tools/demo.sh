#!/bin/sh
# Builds for this machine and lets the shipped Gemma model write text.
set -eu
cd "$(dirname "$0")/.."
tools/build.sh

for prompt in "Question: What is 27 plus 15? Answer:" \
  "Question: Sort these words: river, candle, stone, market. Answer:" \
  "One windy evening, Mia walked to the lake."; do
  printf '\n> %s\n' "$prompt"
  build/bin/gemma --model models/tiny-gemma3 --prompt "$prompt" --max-tokens 48
  echo
done
