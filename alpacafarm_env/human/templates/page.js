"use strict";
// Numbers answer, U takes back, S skips, C goes to the critique. Without this script the buttons do the same.
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=radio]), textarea");
  if (typing && event.key === "Escape") {
    typing.blur();
    return;
  }
  if (typing || event.repeat || event.ctrlKey || event.altKey || event.metaKey) {
    return;
  }
  const key = event.key.toLowerCase();
  const skip = document.getElementById("skip");
  const critique = document.getElementById("critique");
  if (key === "c" && critique) {
    critique.focus();
    event.preventDefault();
    return;
  }
  if (key === "s" && skip) {
    skip.open = true;
    skip.querySelector("input[type=radio]").focus();
    event.preventDefault();
    return;
  }
  const button = document.querySelector(key === "u" ? "#undo button" : `[data-key="${CSS.escape(key)}"]`);
  if (button) {
    event.preventDefault();
    button.click();
  }
});
