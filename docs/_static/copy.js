// A button in each block of code copies it, without the prompts and the output of an example.
// Browsers let only pages from https, this machine or a file do that.
for (const block of navigator.clipboard ? document.querySelectorAll("div.highlight") : []) {
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    const code = block.querySelector("pre").cloneNode(true);
    code.querySelectorAll(".gp, .go").forEach((part) => part.remove());
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = "not allowed";
    }
  });
  block.append(button);
}
