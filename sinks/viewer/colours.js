// One colour scale for everything: logarithmic from 1, the mean of all keys, to the largest value in the file.
"use strict";

const LEVELS = 256;
const STOPS = {
  // from the mean to the maximum; lightness falls (rises on dark) all the way, blue against yellow
  light: ["#f7f5ea", "#e6e6ae", "#a9d08f", "#5db195", "#2f849a", "#2c5688", "#2a2a5e"],
  dark: ["#20242b", "#253c6b", "#2b5f86", "#34868c", "#62ad7f", "#b3cc67", "#fbe96f"],
};
const BALANCE = 0.179; // luminance on which black and white read equally well, with a contrast of 4.58

const darkWanted = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : darkWanted.matches;
}

function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function luminance(rgb) {
  const [r, g, b] = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** LEVELS pairs of a fill and the ink, black or white, that reads better on it. */
function makeRamp(stops) {
  const colours = stops.map(channels);
  return Array.from({ length: LEVELS }, (_, level) => {
    const place = (level / (LEVELS - 1)) * (colours.length - 1);
    const left = Math.min(Math.floor(place), colours.length - 2);
    const rgb = colours[left].map((v, i) => Math.round(v + (colours[left + 1][i] - v) * (place - left)));
    return { fill: `rgb(${rgb.join(", ")})`, ink: luminance(rgb) > BALANCE ? "#000000" : "#ffffff" };
  });
}

const RAMPS = { light: makeRamp(STOPS.light), dark: makeRamp(STOPS.dark) };

function ramp() {
  return RAMPS[isDark() ? "dark" : "light"];
}

/** Where a strength lies on the scale: 0 up to the mean, LEVELS - 1 at the maximum. */
function levelOf(c, maximum) {
  if (!(c > 1)) return 0;
  return Math.min(Math.round((Math.log(c) / Math.log(Math.max(maximum, 1.5))) * (LEVELS - 1)), LEVELS - 1);
}

/** Round numbers between 1 and the maximum for a legend, and the maximum. */
function scaleTicks(maximum) {
  const round = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
  const top = Math.max(maximum, 1.5);
  const below = round.filter((c) => c < top / 1.35);
  return [...(below.length > 5 ? below.filter((c) => /^10*$/.test(c)) : below), top];
}

/** A strength with three digits. */
function show(c) {
  return c >= 100 ? c.toFixed(0) : c >= 10 ? c.toFixed(1) : c.toFixed(2);
}

/** What a custom property of the style sheet is right now, for canvases. */
function themeColour(name) {
  const probe = document.getElementById("probe");
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
