/** Exponential smoothing, as TensorBoard smooths. */

/**
 * The debiased exponential moving average. Gaps stay gaps.
 * @param {(number|null)[]} values
 * @param {number} weight of the past, from 0 (none) to below 1
 * @returns {(number|null)[]}
 */
export function smoothed(values, weight) {
  if (weight <= 0) return values;
  let past = 0;
  let bias = 1;
  return values.map((value) => {
    if (value === null) return null;
    past = past * weight + (1 - weight) * value;
    bias *= weight;
    return past / (1 - bias);
  });
}
