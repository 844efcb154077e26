/**
 * The types of the server's answers, for the type checker; docs/design/ui.md describes them.
 *
 * @typedef {{kind: "log"|"process"|"collector", name: string, state: "live"|"ended"|"lost", message: string}} Source
 * @typedef {{id: string, name: string, started: number|null, last: number|null, live: boolean, messages: number}} Run
 * @typedef {"scalar"|"histogram"|"image"|"array"|"text"|"time"|"check"} TapKind
 * @typedef {{id: number, run: string, name: string, field: string, title: string, kind: TapKind, complex: boolean, count: number, place: string,
 *   unit_x: "step"|"message", last: number|string|null, enabled: boolean|null}} Tap
 * @typedef {{version: string, control: boolean, sources: Source[], runs: Run[], taps: Tap[], taps_total: number, taps_left_out: number,
 *   errors: number, error_kinds: number, losses: number}} Overview
 * @typedef {{tap: number, axis: string, x: number[], min: (number|null)[], max: (number|null)[], mean: (number|null)[], count: number,
 *   exact: boolean, first: number|null, last: number|null, nonfinite: [number, string][], nonfinite_count: number}} Series
 * @typedef {{x: number[], edges: number[], counts: number[][]}} HeatmapData
 * @typedef {{mean: number|null, std: number|null, min: number|null, max: number|null, zeros: number|null,
 *   nonfinite: number|null}} Stats
 * @typedef {{step: number|null, dtype: string, shape: number[], stats: Stats, values: any, image: string|null,
 *   count: number, at: number, strip: [number, number|null, string|null][]}} ArrayData
 * @typedef {{cursor: string, run: string, time: number|null, process: string, device: string, step: number|null, tap: string,
 *   place: string, level: string, text: string}} TextLine
 * @typedef {{lines: TextLine[], more: boolean, next?: string|null, total: number}} TextPage
 * @typedef {{time: number|null, step: number|null}} Moment
 * @typedef {{id: string, kind: string, title: string, place: string, source: [number, string][]|null, count: number,
 *   per: {process: string, device: string, count: number}[], first: Moment, last: Moment, steps: string, values: string,
 *   traceback: string|null}} ErrorGroup
 * @typedef {{runs: {id: string, config: Record<string, number|string|boolean|null>, metrics: Record<string, (number|null)[]>}[],
 *   differing: string[]}} RunTable
 * @typedef {{run: string, process: string, device: string, live: boolean, rate: number|null, queue_bytes: number|null, backlog: number|null,
 *   drops: number|null, stalls: number|null, seconds_in_taps: number|null, last_message: number|null, silent_sec: number|null,
 *   taps: {name: string, messages: number|null, seconds: number|null}[]}} Device
 * @typedef {{name: string, compared: number, differing: number, missing: number, first_step: number|null, max_abs: number|null, x: number[],
 *   difference: (number|null)[]}} TapDifference
 * @typedef {{equal: boolean, first: {tap: string, leaf: string, step: number|null, place: string, text: string, left: string, right: string}|null,
 *   taps: TapDifference[], config: Record<string, any[]>, notes: string[]}} Difference
 * @typedef {{taps: [number, string, string][], tap: number, axis: string, x: number[], stacked: string[], whole: number[], seconds: number[][],
 *   slowest: {x: number|null, step: number|null, time: number|null, seconds: number, longer: [string, number, number][]}[], usual: number, range: [number, number],
 *   places: {place: string, count: number, mean: number|null, p50: number|null, p90: number|null, p99: number|null, share: number|null,
 *     slowest: string, spread: number|null, counts: number[]}[]}} Times
 * @typedef {{overview?: boolean, taps?: [number, number, number|null][], texts?: number, errors?: [number, number], devices?: boolean,
 *   source?: string}} Change
 */
export {};
